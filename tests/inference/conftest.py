from pathlib import Path

import pytest
from atropos.contracts.messages import Message, ToolCall, ToolSpec, assistant, tool_result, user
from atropos.inference.tiny_policy import train_tokenizer
from atropos.inference.tokens import TokenRenderer

CALL = ToolCall(id="call_0", name="calculator", arguments={"expression": "12+34"})
TOOLS = (
    ToolSpec(
        name="calculator",
        description="Evaluate an arithmetic expression.",
        parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    ),
)
CONVERSATION: tuple[Message, ...] = (
    user("What is 12 + 34?"),
    assistant("", (CALL,)),
    tool_result("46", CALL),
    assistant("46"),
)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny policy's kind of tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([(CONVERSATION, TOOLS)] * 3, folder)
    return folder


@pytest.fixture(scope="session")
def renderer(policy_folder: Path) -> TokenRenderer:
    from atropos.contracts.runfile import ModelConfig
    from atropos.inference.tokens import load_renderer

    return load_renderer(ModelConfig(path=str(policy_folder)))
