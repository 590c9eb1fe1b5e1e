"""MLX's fused operations are compiled on the user's machine, whose compiler must decide no bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def built_for(folder: Path, *flags: str) -> str:
    """A PATH whose g++ builds for other processors, as a distribution's may."""
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {" ".join(flags)} "$@"\n')
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def fusing(path: str) -> str:
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-c", FUSED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="flags of x86-64")
def test_mlx_fuses_where_no_product_and_sum_become_one(tmp_path):
    assert fusing(built_for(tmp_path, "-mno-fma")) == "fused"


def test_nothing_is_fused_where_the_compiler_may_round(tmp_path):
    flags = ["-march=x86-64-v3"] if os.uname().machine == "x86_64" else []
    assert fusing(built_for(tmp_path, *flags)) == "apart"
