"""A copy of the repository to plant mutants in, and running its tests there."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hypothesis  # noqa: F401
import mlx_lm  # noqa: F401
import pytest
from mutants import Mutant

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", re.MULTILINE)
# pytest's exit statuses: all passed, no such test (a killer that has been renamed), none collected.
_NOTHING_FAILED = (0, 4, 5)
_COMPILED = ".pytest_cache/metal_host"


class Copy:
    """A context manager: the copy is gone when it ends.

    Args:
        root: the repository; the files that git knows or would add are copied as they are.
    """

    def __init__(self, root: Path) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="mutants-")
        self.folder = Path(self._temporary.name)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in names.splitlines():
            if (root / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, self.folder / name)
        kept = root / "build" / "mutants-compiled"  # all copies': only what changes is compiled
        kept.mkdir(parents=True, exist_ok=True)
        (self.folder / _COMPILED).parent.mkdir()
        (self.folder / _COMPILED).symlink_to(kept)
        # As the installed package has them.
        for part in ("metal", "cli"):
            (self.folder / "dflash_mlx" / part).symlink_to(self.folder / part)

    def __enter__(self) -> "Copy":
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The mutant in the place of its line."""
        path = self.folder / mutant.file
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        if lines[mutant.number - 1].rstrip("\n") != mutant.line:
            raise ValueError(f"{mutant.file}:{mutant.number} is not {mutant.line!r}")
        lines[mutant.number - 1] = mutant.becomes + "\n"
        self._write(path, "".join(lines))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Without leaving bytecode that looks up to date."""
        path.write_text(text)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

    def test(self, tests: Sequence[str], seconds: int) -> tuple[str, str]:
        """Run tests until one fails: its name, "" if none does, and what was printed.

        In a fork of this process, which has imported what takes long. Raises `TimeoutError` after
        so many seconds of the processor's: how busy the machine is makes no difference.
        """
        printed = self.folder / "printed.txt"
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            os._exit(self._run(tests, printed))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            raise TimeoutError
        text = printed.read_text(errors="replace")
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) in _NOTHING_FAILED:
            return "", text
        found = _FAILED.search(text)
        return found[1] if found else "a crash", text

    def _run(self, tests: Sequence[str], printed: Path) -> int:
        """pytest, in a process of its own. Gives its exit status."""
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(self.folder)
        sys.path[:0] = [str(self.folder)]  # before what is installed
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "--no-header"]
        return int(pytest.main([*options, *tests]))
