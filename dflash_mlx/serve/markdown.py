"""Markdown -> inert HTML: nothing of an answer loads, runs or leads anywhere.

HTML in a text stays text. Links and images become their text and their address.

Pygments' regular expressions take minutes for some texts: this runs in the process of a `Worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_ADDRESS: Final = 200  # characters


def _render_link(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    """The end of a link: its address, unless that is the link's text."""
    start = next(one for one in reversed(tokens[:index]) if one.type == "link_open")
    return "</span>" + ("" if start.markup == "autolink" else _address(start.attrs["href"]))


def _render_image(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    image = tokens[index]
    return f"<span>[image: {escapeHtml(image.content)}]</span>" + _address(image.attrs["src"])


def _render_cell(self: Any, tokens: Sequence[Token], index: int, *rest: Any) -> str:
    """A cell's alignment is a class: the page's policy allows no other style."""
    attributes = tokens[index].attrs
    if style := attributes.pop("style", None):
        attributes["class"] = str(style).replace("text-align:", "align-")
    return str(self.renderToken(tokens, index, *rest))


def _address(address: str | int | float) -> str:
    text = str(address)
    shown = text if len(text) <= MAX_ADDRESS else text[:MAX_ADDRESS] + "…"
    return f' <span class="address">{escapeHtml(shown)}</span>'


def _highlight(code: str, language: str, _: str) -> str:
    """Code as spans with Pygments' classes; "" leaves it to be escaped."""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return ""
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


@cache
def _renderer() -> MarkdownIt:
    """CommonMark with tables and strikethrough; a line break stays one, as models mean it."""
    options = {"html": False, "breaks": True, "highlight": _highlight}
    markdown = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    markdown.add_render_rule("link_open", lambda self, *_: '<span class="link">')
    markdown.add_render_rule("link_close", _render_link)
    markdown.add_render_rule("image", _render_image)
    for cell in ("th_open", "td_open"):
        markdown.add_render_rule(cell, _render_cell)
    return markdown


def render(text: bytes) -> bytes:
    """The HTML of a text in UTF-8."""
    return _renderer().render(text.decode()).encode()
