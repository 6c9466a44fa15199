"""Text of others on a terminal: shown, never obeyed."""

import io
import unicodedata

from atropos.contracts.text import one_line, printable
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]x[/red] \u202eabc\u2066 \u200b\r\b\x7f\ud800"


@given(st.text(alphabet=st.characters()))
def test_nothing_but_newlines_and_tabs_controls_a_terminal(text: str) -> None:
    for character in printable(text):
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    assert not set(one_line(text)) & {"\n", "\t"}


@given(st.text(alphabet=st.characters(categories=("L", "N", "P", "S", "Zs", "M"))))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_hostile_text_is_shown_with_its_signs() -> None:
    shown = printable(HOSTILE)
    assert shown == "␛]0;owned␇␛[2J\\u009b31m[red]x[/red] \\u202eabc\\u2066 \\u200b␍␈␡\ufffd"
    page = io.StringIO()
    Console(file=page, force_terminal=True, color_system=None).print(Text(shown), soft_wrap=True)
    assert page.getvalue() == shown + "\n"
