"""`dflash-mlx tune`: kernels on Metal, and what steps take."""

import json

import mlx.core as mx
from program import run
from rich.console import Console

from dflash_mlx.bench.kernels import ShapeTiming
from dflash_mlx.cli.tune import _kernel_json, _kernel_table
from dflash_mlx.kernels.choose import Timing

ROW = ShapeTiming(
    "4096x4096 affine 4-bit g64", 36, Timing({1: 1e-4, 16: 5e-4}, {1: 2e-4, 16: 3e-4})
)


def test_steps_of_each_length_are_timed(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("tune", *pair, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert [*content["milliseconds"]] == ["1", "2", "4", "8", "12", "16"]
    assert all(taken > 0 for taken in content["milliseconds"].values())
    assert (content["kernels"] is None) == (not mx.metal.is_available())


def test_the_table_of_timings(capsys):
    Console(width=100).print(_kernel_table([ROW]))
    printed = capsys.readouterr().out
    assert "100/200" in printed and "500/300" in printed and printed.split()[-1] == "16"
    assert _kernel_json(ROW)["ours_from"] == 16
