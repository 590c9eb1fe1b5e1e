"""Checks with clang for what a Mac's compiler refuses: kernels are compiled as C++ for OpenCL.

OpenCL has Metal's address spaces as types, and the rule that Metal 4.1 (macOS 27) brought: `this`
is generic in a member function that does not say which address space its object is in. A generic
`this` costs a run-time check at best and does not compile where a member goes on to something that
asks for `thread`, so none is allowed here at all.

An array that is to lie in registers is indexed by what the compiler knows. An index that depends
on anything else, a loop that is not unrolled above all, moves the array to a thread's memory: right
results, several times slower. Such a loop is reported elsewhere as 333 ms against 56.

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
from metal_host.wrapper import Wrapper, shared_names, sources

THREADGROUP_MEMORY = 32768  # bytes, of every Apple GPU

_OPTIONS = (
    "-x clcpp -cl-std=clc++2021 -cl-no-stdinc -target spir64 -w "
    "-ferror-limit=40 -ftemplate-backtrace-limit=1"
).split()
# Faults are found in LLVM code: functions with a generic address space in unoptimized code, and
# elements at an index that is not a constant after everything is inlined.
_LLVM = ("-S", "-emit-llvm", "-gline-tables-only", "-o", "-")
_GENERIC = re.compile(r"^define [^@]*@(.*)\(.*addrspace\(4\).*!dbg (!\d+) ", re.M)
_INDEXED = re.compile(
    r"((?:getelementptr .*, ptr %|extractelement|insertelement).*), i\d+ %\w+(?:, !dbg (!\d+))?$",
    re.M,
)
# Loops are unrolled only where a pragma says so, and never replaced by a call that fills memory.
_INLINED = "-O1 -fno-unroll-loops -mllvm -inline-threshold=1000000".split()
_INLINED += ["-mllvm", "-disable-loop-idiom-all"]

# Types of Metal's that C++ would let a kernel use as a name; textures and the like are poisoned
# where the preprocessor reads (include/host/reserved.h).
_SCALARS = "char uchar short ushort int uint long ulong half float bfloat".split()
_TYPES = {
    *(scalar + size for scalar in _SCALARS for size in "234"),
    *(f"{scalar}{c}x{r}" for scalar in ("float", "half") for c in "234" for r in "234"),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"simdgroup_{scalar}8x8" for scalar in ("float", "half", "bfloat")),
    *"uchar ushort uint ulong size_t ptrdiff_t vec matrix array array_ref simdgroup_matrix".split(),
    *"atomic atomic_bool atomic_int atomic_uint atomic_float tensor mem_flags access".split(),
}

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


def _make_vector(match: re.Match[str]) -> str:
    """The call of a function that makes the vector of a match of `_VECTOR`."""
    scalar, size, template_arguments = match.groups()
    return f"metal::make_vector<{template_arguments or f'{scalar}, {size}'}>("


def _readable(text: str) -> str:
    """A text without system headers, whose vectors are made by functions, for OpenCL's clang."""
    return _VECTOR.sub(_make_vector, _SYSTEM_INCLUDE.sub("", text))


def _prelude() -> str:
    """The lines before a unit: declarations of what Metal has, and its reserved names."""
    includes = (HERE / "strict" / "metal.h", HERE / "include" / "host" / "reserved.h")
    lines = [f'#include "{path}"' for path in includes]
    lines += [f"#define {name} metal::{name}" for name in sorted(_TYPES)]  # no name to declare
    return "\n".join([*lines, ""])


def _function(wrapper: Wrapper, signature: str, body: str) -> str:
    """The text of a kernel, whose lines are reported as `name:1` and so on."""
    text = f'#line 1 "{wrapper.name}"\n{_readable(body)}'
    names = shared_names(wrapper.body)
    if names:
        used = " + ".join(f"sizeof({name}_shared)" for name in names)
        limit = f'static_assert({used} <= {THREADGROUP_MEMORY}, "threadgroup memory");'
        text = f"{text[: text.rindex('}')]}{limit}\n}}\n"
    return signature + text


def units(wrappers: Iterable[Wrapper]) -> Iterator[str]:
    """The translation units for these kernels: one for each header."""
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
        _read(unit, "-fsyntax-only")


def faults(wrappers: Iterable[Wrapper]) -> set[str]:
    """The line and code of generic address spaces, and of array accesses with unknown indices.

    Raises CompilationError for kernels that clang refuses.
    """
    messages = set()
    for unit in units(wrappers):
        for pattern, options in ((_GENERIC, ("-O0",)), (_INDEXED, _INLINED)):
            code = _read(unit, *options, *_LLVM)
            # Lines by debug record, such as `!12 = !DILocation(line: 5, column: 3)`.
            lines = dict(re.findall(r"^(!\d+) = .*?\bline: (\d+)", code, re.M))
            for what, record in pattern.findall(code):
                messages.add(f"{lines.get(record, '?')}: {what}")
    return messages


def _read(unit: str, *options: str) -> str:
    """The output of clang for a translation unit. Raises CompilationError."""
    command = [*clang(), *_OPTIONS, *options, "-"]
    result = subprocess.run(command, input=unit, capture_output=True, text=True)
    if result.returncode:
        raise CompilationError(f"{' '.join(command)}\n{result.stderr[:6000]}")
    return result.stdout
