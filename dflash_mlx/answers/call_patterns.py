"""Regular expressions for the syntax of calls, which allow small mistakes of models."""

from __future__ import annotations

import re
from typing import Final

# Replacements for tags in patterns, which allow the variants that models write: </parameter>,
# </parameter/>, </parameter=path>, <parameter=path
_CLOSING: Final = r"</\1\\s*/?(?:=[^<>\\s]*)?\\s*(?:>|(?=\\n|\\Z))"
_ENDING: Final = r"\1(?:[^\\S\\n]*/?>|\\n)"


def pattern_for(text: str) -> str:
    """Make a pattern for text with {name} or {key} that allows white space and small mistakes."""
    # The attribute with which DeepSeek marks strings may be missing.
    pattern = re.escape(text.strip()).replace(r'\ string="\{text\}"', "")
    # Of two closing tags in a row, one is enough.
    pattern = re.sub(r"(</\w+>)\\\n(<\w+>)$", r"(?:\1\\s*(?:\2)?|\\s*\2)", pattern)
    pattern = re.sub("</([^<>]+)>", _CLOSING, pattern)
    # So may the prefixes of tags.
    pattern = pattern.replace("｜DSML｜", "(?:[｜|]+DSML[｜|]+)?").replace("atem:", "(?:atem:)?")
    for group, characters in (("name", r"[^\s<>\"{}]+"), ("key", r"[^<>\"\n]+")):
        # The tag may have other attributes, more white space, or quotes where it has none.
        named = rf"(?P<{group}>{characters})"
        attribute = rf"[^<>]*?\bname\s*=\s*[\"']?(?P<{group}>[^<>\"'\n]+)[\"']?[^<>\n]*?"
        pattern = pattern.replace(rf'name="\{{{group}\}}"', attribute)
        pattern = pattern.replace(rf"=\{{{group}\}}", rf"(?:=|\s+(?:name=)?)[\"']?{named}[\"']?")
        pattern = pattern.replace(rf"\{{{group}\}}", named)
        pattern = re.sub(rf"(\(\?P<{group}>.*)>$", _ENDING, pattern, flags=re.DOTALL)
    # White space matches any white space, or none.
    pattern = re.sub(r"(?:\\[ \n])+", r"\\s*", pattern)
    return pattern + ("\n?" if text.endswith("\n") else "")
