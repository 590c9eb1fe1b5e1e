"""On Linux, nothing is fused: MLX would compile fused operations with the user's compiler.

Its version would then decide bits of the results.
"""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="MLX compiles C++ on Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
# Loads a model, and prints whether MLX fuses four operations into one loop.
FUSED = """
import mlx.core as mx, dflash_mlx as dm
dm.load("tiny", "none")
fused = mx.compile(lambda x: x * 0.3 + x * 1.7 - x * x * x)
graph = __import__("io").StringIO()
mx.export_to_dot(graph, fused(mx.ones((3, 5))))
print("fused" if "Compiled" in graph.getvalue() else "apart")
"""


def fused_or_apart(path: str) -> str:
    """What FUSED prints in a new process."""
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-c", FUSED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_fused_after_a_model_was_loaded():
    assert fused_or_apart(os.environ["PATH"]) == "apart"


def test_a_function_is_still_traced_once(tmp_path):
    """`fuse_nothing` turns off the fusing only. Without compilation, each call would trace it."""
    traced = FUSED + (
        "calls = []\n"
        "f = mx.compile(lambda x: calls.append(1) or x + 1)\n"
        "f(mx.ones(3)); f(mx.ones(3))\n"
        "print(len(calls))\n"
    )
    command = [sys.executable, "-c", traced]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["apart", "1"], done.stderr
