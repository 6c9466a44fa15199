"""Text of models, tools and files on its way to a terminal or a page.

Invariant: nothing that was sampled, answered or typed by others can move the cursor, change colours, reorder what is
read or pass for markup of ours. Control and format characters become visible signs, and whoever prints a text wraps it
in `rich.text.Text`, whose content is never parsed as markup, or escapes it (`dashboard.html`).
"""

import unicodedata
from typing import Final

_KEPT: Final = "\n\t"
_PICTURES: Final = 0x2400
"""Unicode's pictures of the 32 ASCII controls."""


def printable(text: str) -> str:
    """`text` with every control, format, private or unassigned character made visible; newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if character in _KEPT else _shown(character) for character in text)


def one_line(text: str) -> str:
    """`printable`, with newlines and tabs made visible too."""
    return printable(text).replace("\n", "↵").replace("\t", "⇥")


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`, the last of them `…` where some are left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return "␡"
    category = unicodedata.category(character)
    if category == "Cs":
        return "\ufffd"
    if category in ("Cc", "Cf", "Co", "Cn", "Zl", "Zp"):
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character
