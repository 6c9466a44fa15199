"""Who plays in `atropos env try`: an engine, a script, an echo, or a person at the terminal.

Invariant: each is a `Policy`, so trying an environment without a model takes the same road as trying it with one.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..contracts.context import Context
from ..contracts.messages import ImagePart, Message, Role, ToolCall, ToolSpec, assistant
from ..contracts.reasons import FinishReason
from ..environments.play import Reply

if TYPE_CHECKING:
    import httpx


class PolicyError(RuntimeError):
    """The policy cannot play; the message is one sentence."""


class ScriptedPolicy:
    """Says what the environment's own demonstration says, one message of the model after another."""

    def __init__(self, demonstration: Sequence[Message]) -> None:
        self._lines = [message for message in demonstration if message.role is Role.ASSISTANT]

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        if ctx.turn >= len(self._lines):
            raise PolicyError(f"the demonstration has {len(self._lines)} turns, and the episode went on after them")
        return Reply(self._lines[ctx.turn])


class EchoPolicy:
    """Repeats the last message: shows the plumbing of an environment without anything that plays it."""

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        return Reply(assistant(messages[-1].text))


class HumanPolicy:
    """Asks a person. `/NAME {…}` calls the tool NAME with JSON arguments; everything else is said as it is.

    An empty line says nothing and is asked again: a key pressed too often must not end an episode.
    """

    def __init__(self, read: Callable[[str], str] = input) -> None:
        self._read = read

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        line = self._line()
        if not line.startswith("/"):
            return Reply(assistant(line))
        name, _, arguments = line[1:].partition(" ")
        return Reply(assistant("", (read_call(f"call_{ctx.turn}_0", name, arguments or "{}"),)))

    def _line(self) -> str:
        prompt = "you> "
        try:
            while not (line := self._read(prompt).strip()):
                prompt = "(nothing said; Ctrl-D ends the episode) you> "
        except EOFError:
            raise PolicyError("the input ended before the episode did") from None
        return line


class EnginePolicy:
    """A model behind an OpenAI-compatible `/v1/chat/completions`."""

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        api_key: str | None = None,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        timeout: float = 300.0,
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._timeout = timeout

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ctx: Context) -> Reply:
        import httpx

        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout) as client:
            model = self._model or await self._first_model(client)
            body = {"model": model, "messages": [to_wire(message) for message in messages], **self._sampling}
            body |= {"seed": int(ctx.key[:7], 16)}
            if tools:
                body["tools"] = [{"type": "function", "function": tool.model_dump()} for tool in tools]
            return read_reply(await self._ask(client, "POST", "/chat/completions", body))

    async def _first_model(self, client: "httpx.AsyncClient") -> str:
        answer = await self._ask(client, "GET", "/models")
        try:
            self._model = str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise PolicyError(f"{self._base} lists no model; name one with --model") from None
        return self._model

    async def _ask(self, client: "httpx.AsyncClient", method: str, path: str, body: Any = None) -> Any:
        import httpx

        try:
            response = await client.request(method, self._base + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise PolicyError(f"no answer from the engine at {self._base} ({what}); is it running?") from None
        if response.is_error:
            said = " ".join(response.text.split())[:300]
            raise PolicyError(f"the engine at {self._base} refused the call with {response.status_code}: {said}")
        try:
            return response.json()
        except ValueError:
            raise PolicyError(f"the engine at {self._base} answered something that is no JSON") from None


def to_wire(message: Message) -> dict[str, Any]:
    """A message in the chat completions format."""
    wire: dict[str, Any] = {"role": message.role.value}
    if isinstance(message.content, str):
        wire["content"] = message.content
    else:
        wire["content"] = [
            {"type": "image_url", "image_url": {"url": part.url}}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in message.content
        ]
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.raw or json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def read_reply(answer: Any) -> Reply:
    """A chat completion as a reply. Raises PolicyError where it is none."""
    try:
        choice = answer["choices"][0]
        said = choice["message"]
        calls = tuple(
            read_call(call.get("id") or f"call_{index}", call["function"]["name"], call["function"]["arguments"])
            for index, call in enumerate(said.get("tool_calls") or ())
        )
        message = Message(
            role=Role.ASSISTANT,
            content=said.get("content") or "",
            reasoning=said.get("reasoning_content") or said.get("reasoning"),
            tool_calls=calls,
        )
    except (LookupError, TypeError, AttributeError, ValueError):
        raise PolicyError("the engine's answer is no chat completion (no choices[0].message)") from None
    finish = FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP
    usage = answer.get("usage") or {}
    return Reply(message, finish, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """A tool call from the JSON text of its arguments; what cannot be read is kept with its problem."""
    try:
        parsed = json.loads(arguments)
    except ValueError as error:
        return ToolCall(id=call_id, name=name, problem=f"the arguments are no JSON ({error})", raw=arguments)
    if not isinstance(parsed, dict):
        return ToolCall(id=call_id, name=name, problem="the arguments must be a JSON object", raw=arguments)
    return ToolCall(id=call_id, name=name, arguments=parsed)


def at_terminal() -> bool:
    """A person can answer here."""
    return sys.stdin.isatty() and sys.stdout.isatty()
