"""Compiling kernels and the runtime, once each: what has been compiled is kept on disk."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
_INCLUDE = f"-I{HERE / 'include'}"
CACHE = HERE.parents[1] / ".pytest_cache" / "metal_host"

_COMMON = (
    "-std=c++17",
    "-march=native",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-ffp-contract=off",  # what is one operation in the source is one operation
    "-w",
    "-fexcess-precision=16",  # half is rounded after every operation, also between two of them
)
# Of these sanitizers only the calls that they put into the code are used: runtime/checks.cpp.
_CHECKED = (
    "-Og",  # -O1 and -O2 run a little faster, but take far longer to compile
    "-g1",
    "-ftrivial-auto-var-init=pattern",  # a variable that nobody sets is not zero by chance
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fsanitize=thread,shift,integer-divide-by-zero",
    "-fsanitize=bounds-strict",  # also of an array that ends a struct, which C lets reach further
    *("--param", "tsan-instrument-func-entry-exit=0"),  # no calls as functions begin
)
_OLDEST = 12  # with `_Float16` in C++


class CompilationError(RuntimeError):
    """The compiler refuses the kernel; its messages, whose lines are those of header and body."""


@cache
def find_compiler() -> tuple[str, str] | None:
    """The path of g++, which MLX needs too, and its version; None where kernels cannot run."""
    path = shutil.which("g++")
    machine = (platform.system(), platform.machine())
    if path is None or machine not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = said.splitlines()[0]
    return (path, version) if int(version.split()[-1].split(".")[0]) >= _OLDEST else None


def _run(command: Sequence[str], text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(f"{' '.join(command)}\n{done.stderr[:6000]}")


@cache
def _digest(*folders: str) -> str:
    """Of every file in these folders, their names included."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((HERE / folder).rglob("*.*")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class Build:
    """Compiles for one mode, keeping everything in `CACHE`."""

    def __init__(self, checked: bool = True):
        compiler = find_compiler()
        if compiler is None:
            raise CompilationError(f"Metal is emulated with g++ {_OLDEST} or later, on Linux.")
        path, self._version = compiler
        self.checked = checked
        self._folder = CACHE.resolve()
        self._base = (path, *_COMMON, _INCLUDE)

    def _library(
        self, kind: str, source: str, included: str, options: Sequence[str], linked: Sequence[str]
    ) -> Path:
        """The shared library of this C++ text, compiled unless it has been before.

        included: stands for the files that the text includes
        linked:   other libraries, and options for the linker
        """
        command = [*self._base, *options]
        # A runtime is found by name: a kernel of a copied cache would load that of the original by
        # its path, a second one beside the copied one, which runs the launch.
        named = "-Wl,-soname"
        key = "\0".join([self._version, *command, *linked, named, included, source])
        key = key.replace(str(HERE), "").replace(str(self._folder), "")  # a copy has the same
        path = self._folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self._folder) as unfinished:
                compiled, library = (str(Path(unfinished, f"{kind}.{x}")) for x in ("o", "so"))
                _run([*command, "-c", "-x", "c++", "-", "-o", compiled], text=source)
                # Without the options, or a sanitizer of the compiler's own would be linked.
                link = [self._base[0], "-shared", compiled, f"{named},{path.name}"]
                _run([*link, *linked, "-o", library])
                os.replace(library, path)  # whole or not at all, whoever else is compiling it
        return path

    @property
    def runtime(self) -> Path:
        """The runtime, which all kernels of a mode share."""
        files = sorted((HERE / "runtime").glob("*.cpp"))
        source = "".join(f'#include "{path}"\n' for path in files)  # one unit compiles fastest
        mode = ["-DMETAL_HOST_CHECKED"] if self.checked else []
        return self._library(
            "runtime",
            source=source,
            included=_digest("include", "runtime"),
            options=["-O2", *mode],
            linked=[],
        )

    def kernel(self, source: str) -> Path:
        """A kernel, linked to the runtime."""
        mode = _CHECKED if self.checked else ("-O1",)
        linked = [str(self.runtime), "-nostdlib", "-lm"]  # linking other libraries doubles the time
        return self._library(
            "kernel", source=source, included=_digest("include"), options=mode, linked=linked
        )

    def check_syntax(self, source: Path) -> None:
        """Raises CompilationError if a Metal file does not compile by itself."""
        _run([*self._base, "-fsyntax-only", "-x", "c++", str(source)])


def source_line(library: Path, offset: int) -> str:
    """The kernel's line that the code at this offset of it comes from: `body:12`, or ''."""
    tool = shutil.which("addr2line")
    if tool is None or offset == 0:
        return ""
    command = [tool, "--inlines", "-e", str(library), hex(offset - 1)]  # the call, not what follows
    done = subprocess.run(command, capture_output=True, text=True)
    places = re.findall(r"\b((?:header|body):\d+)", done.stdout)  # else a stand-in's own line
    return places[0] if places else ""


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library, loaded once. PyDLL keeps Python's lock, so launches run one at a time."""
    return ctypes.PyDLL(str(path))
