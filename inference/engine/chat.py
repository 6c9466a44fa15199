"""Messages to tokens and back, for the OpenAI routes.

Invariant: the ids that were sampled are what is parsed; text is derived from them for display and never the other way
round. Formats come from the `renderers` library; where it knows none for the tokenizer, the tokenizer's own chat
template is used.
"""

import json
import uuid
from pathlib import Path
from typing import Any

from renderers import ToolCallParseStatus, create_renderer
from renderers.configs import DefaultRendererConfig, Qwen3RendererConfig
from transformers import AutoTokenizer

from .wire import ApiError

QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "</think>")


class Chat:
    """The tokenizer of a model, and its conversation format if it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        known = set(tokenizer.get_vocab())
        qwen = known.issuperset(QWEN_TOKENS)
        if tokenizer.chat_template:
            parser = "qwen3" if qwen else None
            self._renderer = create_renderer(tokenizer, DefaultRendererConfig(tool_parser=parser))
        elif qwen:
            self._renderer = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
        else:
            self._renderer = None

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """The prompt of a conversation, ready for the assistant's turn. Raises ApiError if it has no rendering."""
        if self._renderer is None:
            raise ApiError(400, "This model's tokenizer has no chat format; use /inference/v1/generate.")
        try:
            ids = self._renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
        except Exception as error:
            # Templates raise what they like; whatever it is, this conversation cannot be rendered.
            raise ApiError(400, f"The messages cannot be rendered: {error}") from error
        return list(ids)

    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant's turn."""
        return frozenset() if self._renderer is None else frozenset(self._renderer.get_stop_token_ids())

    def parse(self, prompt: list[int], completion: list[int], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The assistant's message. Well-formed tool calls are listed; a malformed one stays visible in the text."""
        parsed = self._renderer.parse_response(completion, prompt_ids=prompt, tools=tools or None)
        content = parsed.content
        calls = []
        for attempt in parsed.tool_calls if tools else []:
            if attempt.status == ToolCallParseStatus.OK:
                arguments = attempt.arguments
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                function = {"name": attempt.name, "arguments": text}
                calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            else:
                content += attempt.raw
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "tool_calls": calls}
        if not tools:
            message["content"] = self.text(completion)
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        return message

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))


def load_chat(folder: Path) -> Chat | None:
    """The chat side of a model folder; None if it holds no tokenizer, when only token ids are served."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
    return Chat(tokenizer)
