"""`dflash-mlx tune`; and figures that must not be shown without a word, in it and elsewhere."""

import json
import os

import mlx.core as mx
import pytest
from program import run
from rich.console import Console

from dflash_mlx.cli import command_buffers
from dflash_mlx.cli.command_buffers import apply_fastest, find_fastest
from dflash_mlx.cli.output import rate, times
from dflash_mlx.cli.tune import _kernel_table
from dflash_mlx.kernels.autotune import Timing


def test_steps_of_each_length_are_timed(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("tune", *pair, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert [*content["milliseconds"]] == ["1", "2", "4", "8", "12", "16"]
    assert all(taken > 0 for taken in content["milliseconds"].values())
    assert (content["kernels"] is None) == (not mx.metal.is_available())


@pytest.mark.parametrize("load, told", [(0.1, 0), (99.0, 1)])
@pytest.mark.parametrize(
    "command", ["tune", "bench --limit 1 --repeats 1 -n 4", "doctor --offline"]
)
def test_a_busy_machine_is_told(command, load, told, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    options = [] if command.startswith("doctor") else pair
    done = run(*command.split(), *options)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("machine is busy (load 99.0") == told


def test_a_speedup_that_cannot_be_is_marked():
    assert [times(*pair) for pair in ((21.3, 14.0), (13.9, 14.0), (1.36, 1.1), (0.86, 1.0))] == [
        "21.30x?", "13.90x", "1.36x?", "0.86x",
    ]  # fmt: skip
    assert times(0.001, None) == "<0.01x"
    assert [rate(speed) for speed in (0.0, 1.14, 2.06, 9.97, 1234.5)] == [
        "-", "1.1", "2.1", "10", "1,234",
    ]  # fmt: skip


def test_the_table_of_timings(capsys):
    """A Mac's only: `tune` shows it nowhere else."""
    whole = Timing("whole verify", {1: 1e-2, 16: 5e-2}, {1: 2e-2, 16: 3e-2})
    timings = [whole, Timing("attention", {16: 5e-3}, {16: 4e-3})]
    Console(width=100).print(_kernel_table(timings))
    *_, layer, forward = capsys.readouterr().out.splitlines()
    assert "10/20" in layer and "50/30" in layer and forward.split()[-2:] == ["-", "5/4"]


def test_what_is_fastest_is_set_before_mlx_starts(monkeypatch, tmp_path):
    """In processes of their own, in turns; a small gain, another MLX and the user's wish count."""
    speeds = {None: 50.0, 100: 50.5, 200: 60.0, 400: 0.0}
    asked = []
    here = {}
    monkeypatch.setattr(command_buffers, "_file", lambda: tmp_path / "kernels" / "buffers.json")
    monkeypatch.setattr(command_buffers.os, "environ", here)

    def measured(options, size):
        asked.append(size)
        return speeds[size]

    monkeypatch.setattr(command_buffers, "_tokens_per_second", measured)
    apply_fastest(here)
    assert not here, "nothing was measured"
    assert find_fastest(["--model", "a"]) == speeds and asked == [*speeds, *speeds]
    environment = {"MLX_MAX_OPS_PER_BUFFER": "7"}
    apply_fastest(environment)
    assert not here and environment == {"MLX_MAX_OPS_PER_BUFFER": "7"}
    apply_fastest(here)
    assert here == dict.fromkeys(command_buffers.NAMES, "200")
    with monkeypatch.context() as patch:
        patch.setattr(command_buffers, "installed", lambda package: "another")
        here.clear()
        apply_fastest(here)
        assert not here
    speeds[200] = 50.6
    find_fastest([])
    apply_fastest(here)
    assert not here


def test_a_separate_process_decodes(pair):
    assert command_buffers._tokens_per_second([*pair], 200) > 0
    assert command_buffers._tokens_per_second(["--model", "/nowhere"], None) == 0
