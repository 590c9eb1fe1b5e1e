"""Turns Markdown into inert HTML: nothing in an answer can load, run or link to anything.

HTML in a text stays text, and formulas stay as they were written. Links and images become their
text and their address. Every word of a text is in its HTML.

Pygments' regular expressions take minutes for some texts, and let no other thread run. Long runs of
one character are known to cause that, so such code is not highlighted.
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

MAX_ADDRESS: Final = 200  # characters to show of a data URL
MAX_NESTING: Final = 10**6  # markdown-it drops deeper text; Python's recursion limit comes first
MAX_CODE: Final = 20_000  # characters; longer code is not highlighted
# A run of one character. The time that Pygments takes may grow with the cube of its length.
_LONG_RUN: Final = re.compile(r"\s{200}|(.)\1{199}", re.DOTALL)
_FORMULA: Final = re.compile(
    r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?!\s)[^$`\n]+(?<!\s)\$(?!\d)", re.DOTALL
)
_FORMULA_BLOCK: Final = re.compile(r"(?:\\\[.+?\\\]|\$\$.+?\$\$)[ \t]*$", re.DOTALL | re.MULTILINE)


def _render_link_end(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    """Render the end of a link: its address, unless that is the link's text."""
    start = next(token for token in reversed(tokens[:index]) if token.type == "link_open")
    return "</span>" + ("" if start.markup == "autolink" else _address(start, "href"))


def _render_image(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    image = tokens[index]
    return f"<span>[image: {escapeHtml(image.content)}]</span>" + _address(image, "src")


def _render_cell(self: Any, tokens: Sequence[Token], index: int, *further: Any) -> str:
    """Render a cell's alignment as a class, because the page's policy allows no inline style."""
    attributes = tokens[index].attrs
    style = attributes.pop("style", None)
    if style is not None:
        attributes["class"] = str(style).replace("text-align:", "align-")
    return str(self.renderToken(tokens, index, *further))


def _address(token: Token, attribute: str) -> str:
    """Render the address and the title of a link or an image."""
    address = str(token.attrs[attribute])
    title = str(token.attrs.get("title", ""))
    if address.startswith("data:") and len(address) > MAX_ADDRESS:
        address = address[:MAX_ADDRESS] + "…"
    return f' <span class="address">{escapeHtml(f"{address} {title}".rstrip())}</span>'


def _read_formula(state: StateInline, silent: bool) -> bool:
    """An inline rule: a formula is text, in which nothing else is read."""
    formula = _FORMULA.match(state.src, state.pos)
    if formula is None:
        return False
    state.pos = formula.end()
    if not silent:
        state.pending += formula[0]
    return True


def _read_formula_block(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    """A block rule: lines of a formula are not lists, headings or code."""
    formula = _FORMULA_BLOCK.match(state.src, state.bMarks[line] + state.tShift[line])
    if formula is None or formula.end() > state.eMarks[end - 1]:
        return False
    if not silent:
        state.line = line + 1 + formula[0].count("\n")
        state.push("formula", "p", 0).content = formula[0]
    return True


def _render_formula(self: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
    return f'<p class="formula">{escapeHtml(tokens[index].content)}</p>\n'


def _keep_cells(state: StateCore) -> None:
    """A core rule: if a row has more cells than the table's head, its last cell keeps them."""
    lines = state.src.split("\n")
    for index, token in enumerate(state.tokens):
        if token.type != "tr_open" or not token.map:
            continue
        end = index
        while "tr_close" not in state.tokens[end].type:
            end += 1
        row = [cell for cell in state.tokens[index:end] if cell.type == "inline"]
        cells = escapedSplit(lines[token.map[0]].lstrip("> \t").strip().strip("|"))
        row[-1].content = " | ".join([row[-1].content, *cells[len(row) :]])


def _highlight(code: str, language: str, _: str) -> str:
    """Render code as spans with Pygments' classes. "" means that markdown-it escapes the code."""
    if len(code) > MAX_CODE or _LONG_RUN.search(code):
        return ""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return ""
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


@cache
def _renderer() -> MarkdownIt:
    """Make a renderer for CommonMark with tables and strikethrough.

    Line breaks are kept, as models mean them. Definitions of links stay text, because without links
    they would be lost.
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
    markdown.add_render_rule("link_close", _render_link_end)
    markdown.add_render_rule("image", _render_image)
    for cell in ("th_open", "td_open"):
        markdown.add_render_rule(cell, _render_cell)
    return markdown


def render(text: str) -> str:
    """Return the HTML of a text. A text that is nested too deeply is only escaped."""
    try:
        return _renderer().render(text)
    except RecursionError:
        return f'<p class="formula">{escapeHtml(text)}</p>'
