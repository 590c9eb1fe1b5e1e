"""The Metal sources as the single text that a kernel factory takes.

`mx.fast.metal_kernel` compiles an ASCII string and finds no files; in `metal/` the kernels are
ordinary files with local includes. MLX writes the whole text at every call and hashes it when it
computes, so a kernel gets the definitions that it uses, without comments and spare spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

from ..errors import KernelError

_COMMENT = re.compile(r"//.*")
_LOCAL_INCLUDE = re.compile(r'^#include "(?P<name>[^"]+)"$')
_WORD = re.compile(r"\w+")
_SPARE_SPACE = re.compile(r" ?([,;=(){}<>?]) ?")
# Outside of every definition: directives, and where a namespace begins and ends.
_FRAME = re.compile(r"#|using namespace |namespace \w+\{$|\}$")
_TEMPLATE = re.compile(r"template ?<.*>\n")
# The name of a struct, of an alias or a constant, or of a function.
_NAME = re.compile(
    r"struct (\w+)|typedef [^;{]*?(\w+);|constexpr constant \w+ (\w+)=|[^(]*?(\w+)\("
)


def metal_source(name: str, body: str | None = None) -> str:
    """The file `metal/<name>` with every `#include "file"` replaced by that file, once each.

    With the `body` of a kernel: only what it uses of them. `#include <...>` lines stay, comments
    go. Raises `KernelError` for a character outside ASCII.
    """
    lines = list(_lines(name, set()))
    if body is None:
        return "".join(line + "\n" for line in lines)
    parts = list(_parts(lines))
    used, waiting = set[str](), [body]
    while waiting:
        words = set(_WORD.findall(waiting.pop())) - used
        used |= words
        waiting += [part for names, part in parts if words & names]
    return "".join(part + "\n" for names, part in parts if not names or names & used)


def _lines(name: str, seen: set[str]) -> Iterator[str]:
    """The lines of a file and of what it includes; `seen` gains their names."""
    seen.add(name)
    for line in files("dflash_mlx.metal").joinpath(name).read_text("utf-8").splitlines():
        include = _LOCAL_INCLUDE.match(line)
        if not line.isascii():
            raise KernelError(f"metal/{name} has a character outside ASCII: {line.strip()}")
        if include and include["name"] not in seen:
            yield from _lines(include["name"], seen)
        elif not include and line != "#pragma once":
            code = _COMMENT.sub("", line).strip()
            if code and code not in seen:
                seen.update([code] * code.startswith("#include"))
                yield code if code.startswith("#") else _SPARE_SPACE.sub(r"\1", code)


def _parts(lines: list[str]) -> Iterator[tuple[set[str], str]]:
    """The definitions of a text in order, each with its names; what is none has no names."""
    part, depth = "", 0
    for line in lines:
        if not part and _FRAME.match(line):
            yield set(), line
            continue
        part += line
        depth += line.count("{") - line.count("}")
        if depth or line[-1] not in "};":
            part += "\n"
            continue
        if part.startswith("enum"):
            names = set(re.findall(r"(\w+)=", part))
        else:
            found = _NAME.match(_TEMPLATE.sub("", part, count=1))
            names = {name for name in (found.groups() if found else ()) if name}
        yield names, part
        part = ""
