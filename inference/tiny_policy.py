"""The tokenizer and shape of the tiny policy: a model small enough to learn a tool-using task on two cores.

Invariant: it speaks a real format, Qwen3's with thinking off, through the same renderer as any other model; only its
vocabulary is its own. The vocabulary is trained on the environment's own conversations, so the fixed parts of a prompt
collapse into a few tokens each (a prompt has about thirty), while digits and operators stay single: what must be
copied or computed is never hidden inside a longer token.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ..contracts.messages import Message, Role, ToolSpec
from ..contracts.runfile import ModelConfig
from .tokens import RENDERER_FILE, TokenRenderer, TokensError, load_renderer

FORMAT: Final = {"name": "qwen3", "enable_thinking": False}
CONTEXT: Final = 512
END: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"
CONTROL: Final = (PAD, "<|im_start|>", END)
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_ALONE: Final = r'[0-9]|(?<![^0-9 "(\n])[-+*/](?=[0-9 "(])'
"""Digits, and operators where they stand between numbers. A dash inside a word of the system prompt may merge."""
_MERGES: Final = 2000
"""More than are found: training stops when no pair occurs twice, at about 560 entries for the calculator."""

Conversation = tuple[Sequence[Message], Sequence[ToolSpec]]


def train_tokenizer(conversations: Iterable[Conversation], folder: Path) -> TokenRenderer:
    """Train the vocabulary on whole conversations and write tokenizer and format to `folder`."""
    blank = _renderer_in_memory(_tokenizer((), merges=0))
    splitter = re.compile("|".join(re.escape(mark) for mark in (*CONTROL, *MARKS)))
    texts: list[str] = []
    for messages, tools in conversations:
        texts.extend(part for part in splitter.split(blank.decode(blank.open(messages, tools))) if part)
    tokenizer = _tokenizer(texts, merges=_MERGES)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    (folder / RENDERER_FILE).write_text(json.dumps(FORMAT) + "\n", "utf-8")
    return load_renderer(ModelConfig(path=str(folder), renderer="qwen3"))


def demonstration(
    renderer: TokenRenderer, prompt: Sequence[Message], answers: Sequence[Message], tools: Sequence[ToolSpec]
) -> tuple[list[int], list[int]]:
    """A demonstrated episode as ids and mask (1 where the model speaks), built as an engine's stream would be.

    Raises TokensError where the conversation does not fit one segment.
    """
    messages = list(prompt)
    ids = renderer.open(messages, tools)
    mask = [0] * len(ids)
    heard: list[Message] = []
    turn_prompt, said = ids, list[int]()
    for message in answers:
        if message.role is not Role.ASSISTANT:
            heard.append(message)
            continue
        if heard:
            delta = renderer.extend(turn_prompt, said, heard, tools)
            if delta is None:
                raise TokensError("a demonstration does not fit one segment")
            ids, mask = ids + delta, mask + [0] * len(delta)
            messages += heard
            heard = []
        turn_prompt = ids
        said = renderer.speak(messages, message, tools, after=ids)
        ids, mask = ids + said, mask + [1] * len(said)
        messages.append(message)
    return ids, mask


def _tokenizer(texts: Iterable[str], merges: int) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_ALONE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in CONTROL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def _renderer_in_memory(tokenizer: Any) -> TokenRenderer:
    from renderers.base import create_renderer
    from renderers.configs import Qwen3RendererConfig

    return TokenRenderer(tokenizer, create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False)), "qwen3", {})
