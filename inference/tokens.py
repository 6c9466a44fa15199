"""Messages to tokens and back, by the chat formats of the `renderers` library.

Invariant: within a segment the stream of ids only grows. `extend` appends to exactly what was sent and what was
sampled, or says None, and then the caller opens a new segment; nothing sampled is tokenised a second time and nothing
is thrown away. So the ids of a segment are the ids the engine saw, and the mask (1 on sampled ids) needs no guessing.

The token that ends a turn is there once: sampled where the model stopped by itself; where a turn was cut by its
length, the format's own end opens the next delta and is not counted as sampled.

Which format: `ModelConfig.renderer` is a name of the library, with options after a question mark where the format has
some (`qwen3?enable_thinking=false`). `auto` takes `renderer.json` of the model's folder (`{"name": "qwen3",
"enable_thinking": false}`), else the library's own table of models, else the model's chat template, which cannot be
extended: every turn opens a segment.
"""

import difflib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from pydantic import ValidationError

from ..contracts.messages import Message, Role, ToolCall, ToolSpec
from ..contracts.runfile import ModelConfig
from .calls import checked_call
from .plain import TokensError as TokensError
from .plain import broken_up, plain_message, plain_tools, spellings, without_surrogates

logger = logging.getLogger(__name__)

RENDERER_FILE: Final = "renderer.json"
_LIMIT_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class TokenRenderer:
    """Messages ↔ ids of one model. Safe to share between threads and tasks.

    `context_limit`: longest prompt plus completion in tokens by the model's own `config.json`, None where unknown.
    `vocabulary`: number of ids the model may sample (embedding rows, which may exceed the tokenizer's).
    """

    def __init__(self, tokenizer: Any, renderer: Any, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.context_limit = _context_limit(config)
        self.vocabulary = max(len(tokenizer), _whole(_text_config(config).get("vocab_size")) or 0)
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._control = spellings(tokenizer.all_special_tokens)
        self._marks = spellings(str(token) for token in tokenizer.added_tokens_decoder.values())
        # One thread at a time: a fast tokenizer refuses to be borrowed twice while its settings change.
        self._lock = threading.Lock()

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The whole prompt, up to where the model begins to speak. Raises TokensError."""
        plain = [self._plain(message) for message in messages]
        try:
            with self._lock:
                ids = self._renderer.render_ids(plain, tools=plain_tools(tools), add_generation_prompt=True)
        except Exception as error:
            raise TokensError(f"the {self.name} format cannot render these messages: {_short(error)}") from error
        return list(ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """The ids to append after `prompt_ids + sampled` so that `new_messages` are told and the model speaks next.

        None where the format cannot continue this stream: the caller opens a new segment with all messages.
        Raises TokensError where the messages cannot be rendered at all.
        """
        before = [*prompt_ids, *sampled]
        plain = [self._plain(message) for message in new_messages]
        try:
            with self._lock:
                bridged = self._renderer.bridge_to_next_turn(
                    previous_prompt_ids=list(prompt_ids),
                    previous_completion_ids=list(sampled),
                    new_messages=plain,
                    tools=plain_tools(tools),
                )
        except Exception as error:
            raise TokensError(f"the {self.name} format cannot render these messages: {_short(error)}") from error
        ids = None if bridged is None else list(bridged.token_ids)
        if ids is None or len(ids) <= len(before) or ids[: len(before)] != before:
            return None
        return ids[len(before) :]

    def parse(
        self,
        sampled: Sequence[int],
        *,
        turn: int,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[ToolSpec] = (),
        agent: str | None = None,
    ) -> Message:
        """The message in sampled ids. Never raises: what cannot be read becomes a tool call with a `problem`.

        Call ids are `call_{turn}_{index}`, or the format's own where it has them, so parsing again gives the same.
        """
        try:
            with self._lock:
                parsed = self._renderer.parse_response(
                    list(sampled),
                    tools=plain_tools(tools),
                    prompt_ids=None if prompt_ids is None else list(prompt_ids),
                )
        except Exception as error:  # the library trusts its JSON: deep nesting and huge numbers raise through it
            raw = self.decode(sampled)
            problem = f"The message could not be read ({type(error).__name__}); call the tool again, in plain JSON."
            call = ToolCall(id=f"call_{turn}_0", name="", problem=problem, raw=raw)
            return Message(role=Role.ASSISTANT, content="", tool_calls=(call,), agent=agent)
        taken: set[str] = set()
        calls = []
        for index, call in enumerate(parsed.tool_calls):
            own = call.id if isinstance(call.id, str) and call.id and call.id not in taken else None
            call_id = own or f"call_{turn}_{index}"
            taken.add(call_id)
            calls.append(_tool_call(call_id, call))
        return Message(
            role=Role.ASSISTANT,
            content=parsed.content or "",
            reasoning=parsed.reasoning_content or None,
            tool_calls=tuple(calls),
            agent=agent,
        )

    def speak(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec] = (), *, after: Sequence[int]
    ) -> list[int]:
        """The ids a model would sample to say `answer`, its end token included, where `after` is the stream so far.

        For demonstrations. Raises TokensError where the format writes a finished turn otherwise than it is sampled.
        """
        plain = [self._plain(message) for message in (*messages, answer)]
        with self._lock:
            whole = list(self._renderer.render_ids(plain, tools=plain_tools(tools), add_generation_prompt=False))
        said = whole[len(after) :]
        ends = [position for position, token in enumerate(said) if token in self.stop_token_ids]
        if whole[: len(after)] != list(after) or not ends:
            raise TokensError(f"the {self.name} format cannot show this answer as it would be sampled")
        return said[: ends[0] + 1]

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message for the library, unable to end its own turn.

        Text that others wrote may spell a control token (`<|im_end|>`), which would be tokenised as one and forge the
        turns after it. Such a spelling is broken by an invisible character; in tool results so are the format's other
        marks (`</tool_response>`).
        """
        plain = plain_message(message)
        plain["content"] = without_surrogates(plain["content"])
        if message.role is not Role.ASSISTANT:
            pattern = self._marks if message.role is Role.TOOL else self._control
            plain["content"] = pattern.sub(broken_up, plain["content"])
        return plain

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


_LOADED: dict[tuple[str, str, str], TokenRenderer] = {}
_LOADING: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
"""One lock a model: a hub that does not answer for one must not hold up the others."""


def load_renderer(model: ModelConfig) -> TokenRenderer:
    """The renderer of a model, kept for the life of the process. Reads the tokenizer's files, never the weights.

    Raises TokensError with one sentence: folder missing, no tokenizer in it, unknown format (with the nearest name).
    """
    key = (model.path, model.revision, model.renderer)
    with _LOADING[key]:
        if key not in _LOADED:
            _LOADED[key] = _load(model)
        return _LOADED[key]


def load_code() -> None:
    """Import what the first renderer of a process needs: a second of CPU, in which the interpreter is held."""
    from renderers import base, configs  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    base._populate_registry()


def _load(model: ModelConfig) -> TokenRenderer:
    from renderers.base import create_renderer

    folder = Path(model.path).expanduser()
    name, options = _chosen_format(model.renderer, folder)
    config_class = _config_class(name)
    tokenizer = _load_tokenizer(model, folder)
    try:
        renderer = create_renderer(tokenizer, config_class(**options))
        if getattr(renderer, "config", None) is not None:
            name = renderer.config.name
    except Exception as error:
        raise TokensError(
            f"model.renderer: {name!r} does not fit the tokenizer of {model.path}: {_short(error)}"
        ) from error
    if name == "default" and not getattr(tokenizer, "chat_template", None):
        raise TokensError(
            f"model.renderer: {model.path} has no chat template and is in no table; name its format, e.g. qwen3"
        )
    if name == "default":
        logger.warning("%s uses its chat template: tool calls are not read and every turn opens a segment", model.path)
    return TokenRenderer(tokenizer, renderer, name, _model_config(model, folder))


def _chosen_format(spec: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Name and options: what is spelt after `?` wins over the model folder's `renderer.json` for the same name."""
    name, _, query = spec.partition("?")
    options: dict[str, Any] = {}
    file = folder / RENDERER_FILE
    if file.is_file():
        try:
            saved = dict(json.loads(file.read_text("utf-8")))
            saved_name = str(saved.pop("name"))
        except (ValueError, KeyError, TypeError) as error:
            raise TokensError(f"{file} is not usable: it needs a JSON object with a name ({error})") from error
        if name in ("auto", saved_name):
            name, options = saved_name, saved
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, options


def _config_class(name: str) -> Any:
    from renderers import base, configs

    base._populate_registry()
    known = ["auto", *sorted(base.RENDERER_REGISTRY)]
    plain = name.replace("_", "-")
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise TokensError(f"model.renderer: no chat format is called {name!r}; {hint}")
    return configs.AutoRendererConfig if plain == "auto" else configs._config_class_for(plain)


def _load_tokenizer(model: ModelConfig, folder: Path) -> Any:
    # Not AutoTokenizer first: it imports torch where that is installed, which a worker does not need.
    from transformers import PreTrainedTokenizerFast

    local = _is_local(model.path, folder)
    if local and folder.exists() and not folder.is_dir():
        raise TokensError(
            f"model.path: {model.path} is a file, not a folder; name the folder that a model was saved to"
        )
    if local and not folder.is_dir():
        raise TokensError(f"model.path: the folder {model.path} does not exist")
    source = str(folder) if local else model.path
    revision = {} if local else {"revision": model.revision}
    try:
        if not local or (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(source, **revision)
    except Exception as error:
        if local:
            raise TokensError(
                f"model.path: {folder / 'tokenizer.json'} cannot be read ({_short(error)}); save the tokenizer again"
            ) from error
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **revision)
    except Exception as error:
        first = _short(error)
        if local:
            raise TokensError(
                f"model.path: no tokenizer can be read from the folder {model.path}; "
                "name one that a model was saved to with its tokenizer (tokenizer.json)"
            ) from error
        raise TokensError(
            f"model.path: {model.path} is neither a folder here nor a model the Hugging Face hub gives us ({first})"
        ) from error


def _short(error: Exception) -> str:
    """The gist of another library's error on one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _is_local(path: str, folder: Path) -> bool:
    return folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1


def _model_config(model: ModelConfig, folder: Path) -> dict[str, Any]:
    """The model's config.json as plain JSON; empty where there is none."""
    file: Path | str | None = folder / "config.json"
    try:
        if not _is_local(model.path, folder):
            from transformers.utils.hub import cached_file

            file = cached_file(model.path, "config.json", revision=model.revision)
        value = json.loads(Path(file).read_text("utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _context_limit(config: dict[str, Any]) -> int | None:
    values = [_whole(_text_config(config).get(name)) for name in _LIMIT_FIELDS]
    return next((value for value in values if value is not None), None)


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


_PROBLEMS: Final = {
    "invalid_json": "The tool call is not valid JSON.",
    "unclosed_block": "The tool call was opened but never closed.",
    "missing_name": "The tool call has no name.",
    "malformed_structure": "The tool call does not have the shape this format asks for.",
}


def _tool_call(call_id: str, parsed: Any) -> ToolCall:
    problem = _PROBLEMS.get(str(parsed.status.value))
    return checked_call(call_id, parsed.name, parsed.arguments, parsed.raw or "", problem)
