"""What a Mac's compiler refuses, asked of clang: kernels read as C++ for OpenCL.

OpenCL has Metal's address spaces as types, and the rule that Metal 4.1 (macOS 27) brought: `this`
is generic in a member function that does not say which address space its object is in. A generic
`this` costs a run-time check at best and does not compile where a member goes on to something that
asks for `thread`, so none is allowed here at all.

clang comes with the PyPI package `ziglang`, so these checks run wherever the tests do. Kernels are
read in batches: all that share a header are one translation unit, and none is kept on disk.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from metal_host.compiler import HERE, CompilationError
from metal_host.glue import shared_names, sources
from metal_host.wrapper import Wrapper

THREADGROUP_MEMORY = 32768  # bytes, of every Apple GPU

_OPTIONS = (
    "-x clcpp -cl-std=clc++2021 -cl-no-stdinc -target spir64 -fsyntax-only -w "
    "-ferror-limit=40 -ftemplate-backtrace-limit=1"
).split()

# `float4(...)` or `vec<T, 4>(...)`: clang's own vectors, which alone know address spaces, have no
# constructors.
_VECTOR = re.compile(
    r"\b(?:(float|half|bfloat|u?(?:char|short|int|long))([234])"
    r"|vec\s*<([^<>()]*(?:<[^<>]*>)?[^<>()]*)>)\s*\("
)
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<[^>]*>", re.MULTILINE)


@cache
def clang() -> tuple[str, ...]:
    """The command of the clang in `ziglang`."""
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise CompilationError("the strict checks need clang: pip install -e '.[mlx,dev]'")
    return str(Path(spec.origin).with_name("zig")), "clang"


def _make_vector(found: re.Match[str]) -> str:
    scalar, size, both = found.groups()
    return f"metal::make_vector<{both or f'{scalar}, {size}'}>("


def _readable(text: str) -> str:
    return _VECTOR.sub(_make_vector, _SYSTEM_INCLUDE.sub("", text))


def _prelude() -> str:
    includes = (HERE / "strict" / "metal.h", HERE / "include" / "host" / "reserved.h")
    return "".join(f'#include "{path}"\n' for path in includes)


def _function(wrapper: Wrapper, signature: str, body: str) -> str:
    """One kernel; its lines are `name:1` and on."""
    text = f'#line 1 "{wrapper.name}"\n{_readable(body)}'
    if names := shared_names(wrapper.body):
        used = " + ".join(f"sizeof({name}_shared)" for name in names)
        limit = f'static_assert({used} <= {THREADGROUP_MEMORY}, "threadgroup memory");'
        text = f"{text[: text.rindex('}')]}{limit}\n}}\n"
    return signature + text


def units(wrappers: Iterable[Wrapper]) -> Iterator[str]:
    """The translation units in which clang reads these kernels: one for each header."""
    headers: dict[str, dict[str, str]] = {}
    for wrapper in wrappers:
        header, signature, body = sources(wrapper)
        functions = headers.setdefault(header, {})
        functions[wrapper.text] = _function(wrapper, signature, body)
    for header, functions in headers.items():
        yield f'{_prelude()}#line 1 "header"\n{_readable(header)}{"".join(functions.values())}'


def check_strictly(wrappers: Iterable[Wrapper]) -> None:
    """Raises CompilationError for what Metal refuses in a kernel, with clang's own messages."""
    for unit in units(wrappers):
        read(unit)


def read(unit: str, *options: str) -> str:
    """What clang prints of a unit of `units`. Raises CompilationError."""
    command = [*clang(), *_OPTIONS, *options, "-"]
    done = subprocess.run(command, input=unit, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(f"{' '.join(command)}\n{done.stderr[:6000]}")
    return done.stdout
