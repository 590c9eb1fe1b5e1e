"""MLX's fused operations are compiled on the user's machine, whose compiler must decide no bit."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="MLX compiles C++ on Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
# What MLX fuses into one loop: 0 or 1 builds of a library after loading a model.
FUSED = """
import mlx.core as mx, dflash_mlx as dm
dm.load("tiny", "none")
fused = mx.compile(lambda x: x * 0.3 + x * 1.7 - x * x * x)
graph = __import__("io").StringIO()
mx.export_to_dot(graph, fused(mx.ones((3, 5))))
print("fused" if "Compiled" in graph.getvalue() else "apart")
"""


def fusing(path: str) -> str:
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-c", FUSED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_fused():
    assert fusing(os.environ["PATH"]) == "apart"


def test_a_function_is_still_traced_once(tmp_path):
    """MLX without the function that `fuse_nothing` calls would run it each time."""
    traced = FUSED + (
        "calls = []\n"
        "f = mx.compile(lambda x: calls.append(1) or x + 1)\n"
        "f(mx.ones(3)); f(mx.ones(3))\n"
        "print(len(calls))\n"
    )
    command = [sys.executable, "-c", traced]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["apart", "1"], done.stderr
