"""Single tokens as people read them."""

from collections.abc import Callable
from pathlib import Path

from ..contracts.runfile import ModelConfig

Decode = Callable[[int], str]


def decoder(model: ModelConfig) -> Decode:
    """Ids as text where the model's folder is here; a hub is not asked only to show something.

    Elsewhere the ids themselves, each followed by a space. Reads the tokenizer's files once a process.
    """
    from .tokens import TokensError, load_renderer

    if Path(model.path).expanduser().is_dir():
        try:
            renderer = load_renderer(model)
        except TokensError:
            return _as_id
        return lambda token: renderer.decode([token])
    return _as_id


def _as_id(token: int) -> str:
    return f"{token} "
