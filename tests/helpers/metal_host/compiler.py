"""Compiles kernels and the runtime, once each: the compiled libraries are stored on disk."""

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
    "-ffp-contract=off",  # does not fuse operations
    "-w",
    "-fexcess-precision=16",  # half is rounded after every operation, also between two of them
)
# Of these sanitizers only the calls that they put into the code are used: runtime/checks.cpp.
_CHECKED = (
    "-Og",  # -O1 and -O2 run a little faster, but take far longer to compile
    "-g1",
    "-ftrivial-auto-var-init=pattern",  # a variable that is never set is not zero by chance
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fsanitize=thread,shift,integer-divide-by-zero",
    "-fsanitize=bounds-strict",  # also of an array that ends a struct, which C lets reach further
    *("--param", "tsan-instrument-func-entry-exit=0"),  # no calls as functions begin
)
_OLDEST = 12  # the first version with `_Float16` in C++


class CompilationError(RuntimeError):
    """The compiler refuses the kernel; its messages, whose lines are those of header and body."""


@cache
def find_compiler() -> tuple[str, str] | None:
    """The path and version of g++, which MLX needs as well; None where kernels cannot run."""
    path = shutil.which("g++")
    machine = (platform.system(), platform.machine())
    if path is None or machine not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        return None
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = output.splitlines()[0]
    major = int(version.split()[-1].split(".")[0])
    return (path, version) if major >= _OLDEST else None


def _run(command: Sequence[str], text: str | None = None) -> None:
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode:
        raise CompilationError(f"{' '.join(command)}\n{result.stderr[:6000]}")


@cache
def _digest(*folders: str) -> str:
    """A hash of the names and contents of all files in the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((HERE / folder).rglob("*.*")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class Build:
    """Compiles for the checked or the unchecked mode, and stores the libraries in `CACHE`."""

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
        """The shared library of a C++ text, which is compiled unless it is stored already.

        included: a hash of the files that the text includes
        linked:   other libraries, and options of the linker
        """
        command = [*self._base, *options]
        # A kernel finds its runtime by name. By its path, a kernel of a copied cache would load the
        # original's runtime in addition to the copied one, which runs the launch.
        named = "-Wl,-soname"
        key = "\0".join([self._version, *command, *linked, named, included, source])
        key = key.replace(str(HERE), "").replace(str(self._folder), "")  # a copy has the same
        path = self._folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self._folder) as unfinished:
                compiled, library = (str(Path(unfinished, f"{kind}.{x}")) for x in ("o", "so"))
                _run([*command, "-c", "-x", "c++", "-", "-o", compiled], text=source)
                # Without the options, which would link the compiler's sanitizer libraries.
                link = [self._base[0], "-shared", compiled, f"{named},{path.name}"]
                _run([*link, *linked, "-o", library])
                os.replace(library, path)  # atomic, as another process may compile it as well
        return path

    @property
    def runtime(self) -> Path:
        """The library of the runtime, which all kernels of a mode share."""
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
        """The library of a kernel, linked to the runtime."""
        mode = _CHECKED if self.checked else ("-O1",)
        linked = [str(self.runtime), "-nostdlib", "-lm"]  # linking other libraries doubles the time
        return self._library(
            "kernel", source=source, included=_digest("include"), options=mode, linked=linked
        )

    def check_syntax(self, source: Path) -> None:
        """Raises CompilationError if a Metal file does not compile by itself."""
        _run([*self._base, "-fsyntax-only", "-x", "c++", str(source)])


def source_line(library: Path, offset: int) -> str:
    """The kernel's source line of the code at an offset, such as `body:12`, or ''."""
    tool = shutil.which("addr2line")
    if tool is None or offset == 0:
        return ""
    # The offset is that of the code after a call, so one less is in the call.
    command = [tool, "--inlines", "-e", str(library), hex(offset - 1)]
    result = subprocess.run(command, capture_output=True, text=True)
    # Other lines are of the replacements for Metal's headers.
    places = re.findall(r"\b((?:header|body):\d+)", result.stdout)
    return places[0] if places else ""


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library, loaded once. PyDLL keeps Python's lock, so launches run one at a time."""
    return ctypes.PyDLL(str(path))
