"""`make demo` says what it installs: with a fake pip, through a pipe and on a terminal."""

import subprocess
import sys
from pathlib import Path

import pexpect
import pyte
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.py"
SAID = [
    "Obtaining file:///clone",
    "Collecting mlx-lm<0.33,>=0.31 (from dflash-lossless==0.1.0)",
    "  Downloading mlx_lm-0.32.2-py3-none-any.whl.metadata (10 kB)",
    "Downloading mlx_cpu-0.32.4-cp313-cp313-manylinux_2_35_x86_64.whl (85.2 MB)",
    "Using cached numpy-2.3.5-cp313-cp313-manylinux_2_28_x86_64.whl (16.6 MB)",
    "Installing collected packages: numpy, mlx-cpu, mlx-lm",
    "Successfully installed numpy-2.3.5",
]


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A function that makes a pip with this exit status; it prints `SAID`."""

    def make(status):
        text = f"import sys\nprint(*{SAID!r}, sep='\\n')\nsys.exit({status})\n"
        (tmp_path / "pip.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


def test_a_pipe_gets_what_is_fetched(pip):
    pip(0)
    done = subprocess.run([sys.executable, SCRIPT, "x"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == [
        "  fetching mlx-cpu 0.32.4 (85.2 MB)",
        "  fetching numpy 2.3.5 (16.6 MB)",
        "  installing 3 packages",
    ]


def test_a_failure_shows_all_that_pip_said(pip):
    pip(3)
    done = subprocess.run([sys.executable, SCRIPT, "x"], capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.splitlines() == SAID


def test_a_terminal_shows_what_is_done_now_in_one_line(pip):
    pip(0)
    program = pexpect.spawn(sys.executable, [str(SCRIPT), "x"], encoding="utf-8", timeout=60)
    program.expect(pexpect.EOF)
    program.close()
    assert program.exitstatus == 0
    screen = pyte.Screen(80, 24)
    shown = []
    stream = pyte.Stream(screen)
    for piece in program.before.split("\r"):
        stream.feed(f"\r{piece}")
        lines = [line.strip() for line in screen.display if line.strip()]
        assert len(lines) <= 1
        shown += lines
    assert shown == [
        "looking for mlx-lm",
        "fetching mlx-cpu 0.32.4 (85.2 MB)",
        "fetching numpy 2.3.5 (16.6 MB)",
        "installing 3 packages",
    ]
    assert not [line for line in screen.display if line.strip()]
