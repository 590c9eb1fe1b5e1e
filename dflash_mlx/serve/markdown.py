"""Markdown -> inert HTML: nothing of an answer loads, runs or leads anywhere.

HTML in a text stays text, and formulas stay as they were written. Links and images become their
text and their address. Every word of a text is in its HTML.

Pygments' regular expressions take minutes for some texts, and let no other thread run. What is
known for that, long runs of one character, is not coloured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.rules_block import StateBlock
from markdown_it.rules_block.table import escapedSplit
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_ADDRESS: Final = 200  # characters, of one that has an image in it
MAX_NESTING: Final = 10**6  # markdown-it drops what is deeper; Python's own limit comes first
MAX_CODE: Final = 20_000  # characters of code that is coloured
# Pygments takes the cube of the length of one.
_LONG_RUN: Final = re.compile(r"\s{200}|(.)\1{199}", re.DOTALL)
_FORMULA: Final = re.compile(
    r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?!\s)[^$`\n]+(?<!\s)\$(?!\d)", re.DOTALL
)
_BLOCK: Final = re.compile(r"(?:\\\[.+?\\\]|\$\$.+?\$\$)[ \t]*$", re.DOTALL | re.MULTILINE)


def _render_link(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    """The end of a link: its address, unless that is the link's text."""
    start = next(one for one in reversed(tokens[:index]) if one.type == "link_open")
    return "</span>" + ("" if start.markup == "autolink" else _address(start, "href"))


def _render_image(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    image = tokens[index]
    return f"<span>[image: {escapeHtml(image.content)}]</span>" + _address(image, "src")


def _render_cell(self: Any, tokens: Sequence[Token], index: int, *rest: Any) -> str:
    """A cell's alignment is a class: the page's policy allows no other style."""
    attributes = tokens[index].attrs
    if style := attributes.pop("style", None):
        attributes["class"] = str(style).replace("text-align:", "align-")
    return str(self.renderToken(tokens, index, *rest))


def _address(token: Token, attribute: str) -> str:
    text, title = str(token.attrs[attribute]), str(token.attrs.get("title", ""))
    is_data = text.startswith("data:") and len(text) > MAX_ADDRESS
    shown = text[:MAX_ADDRESS] + "…" if is_data else text
    return f' <span class="address">{escapeHtml(f"{shown} {title}".rstrip())}</span>'


def _read_formula(state: StateInline, silent: bool) -> bool:
    """An inline rule: a formula is text, in which nothing else is read."""
    found = _FORMULA.match(state.src, state.pos)
    if found is None:
        return False
    state.pos = found.end()
    if not silent:
        state.pending += found[0]
    return True


def _read_formula_block(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    """A block rule: lines of a formula are no lists, headings or code."""
    found = _BLOCK.match(state.src, state.bMarks[line] + state.tShift[line])
    if found is None or found.end() > state.eMarks[end - 1]:
        return False
    if not silent:
        state.line = line + 1 + found[0].count("\n")
        state.push("formula", "p", 0).content = found[0]
    return True


def _render_formula(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    return f'<p class="formula">{escapeHtml(tokens[index].content)}</p>\n'


def _keep_cells(state: StateCore) -> None:
    """A core rule: the last cell of a row has those that the table's head has no column for."""
    lines = state.src.split("\n")
    for index, token in enumerate(state.tokens):
        if token.type == "tr_open" and token.map:
            closes = (
                at for at in range(index, len(state.tokens)) if "tr_close" in state.tokens[at].type
            )
            row = [one for one in state.tokens[index : next(closes)] if one.type == "inline"]
            cells = escapedSplit(lines[token.map[0]].lstrip("> \t").strip().strip("|"))
            row[-1].content = " | ".join([row[-1].content, *cells[len(row) :]])


def _highlight(code: str, language: str, _: str) -> str:
    """Code as spans with Pygments' classes; "" leaves it to be escaped."""
    if len(code) > MAX_CODE or _LONG_RUN.search(code):
        return ""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return ""
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


@cache
def _renderer() -> MarkdownIt:
    """CommonMark with tables and strikethrough; a line break stays one, as models mean it.

    Definitions of links stay text: without a link they would be lost.
    """
    options = {"html": False, "breaks": True, "highlight": _highlight, "maxNesting": MAX_NESTING}
    markdown = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    markdown.disable("reference")
    markdown.inline.ruler.before("escape", "formula", _read_formula)
    stops: Any = {"alt": ["paragraph", "blockquote", "list"]}
    markdown.block.ruler.before("code", "formula", _read_formula_block, stops)
    markdown.core.ruler.after("block", "cells", _keep_cells)
    markdown.add_render_rule("formula", _render_formula)
    markdown.add_render_rule("link_open", lambda self, *_: '<span class="link">')
    markdown.add_render_rule("link_close", _render_link)
    markdown.add_render_rule("image", _render_image)
    for cell in ("th_open", "td_open"):
        markdown.add_render_rule(cell, _render_cell)
    return markdown


def render(text: str) -> str:
    """The HTML of a text; of one that is nested too deeply, the text as it is."""
    try:
        return _renderer().render(text)
    except RecursionError:
        return f'<p class="formula">{escapeHtml(text)}</p>'
