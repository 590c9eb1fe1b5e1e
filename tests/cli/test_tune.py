"""`dflash-mlx tune`, and warnings about measurements that cannot be trusted."""

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


@pytest.mark.parametrize("load, warnings", [(0.1, 0), (99.0, 1)])
@pytest.mark.parametrize(
    "command", ["tune", "bench --limit 1 --repeats 1 -n 4", "doctor --offline"]
)
def test_a_warning_says_that_the_machine_is_busy(
    command, load, warnings, pair, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    options = [] if command.startswith("doctor") else pair
    done = run(*command.split(), *options)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("machine is busy (load 99.0") == warnings


@pytest.mark.parametrize(
    ("speedup", "tokens_per_step", "shown"),
    [
        (21.3, 14.0, "21.30x?"),
        (13.9, 14.0, "13.90x"),
        (1.36, 1.1, "1.36x?"),
        (0.86, 1.0, "0.86x"),
        (0.001, None, "<0.01x"),
    ],
)
def test_a_speedup_above_the_tokens_per_step_is_marked_as_doubtful(speedup, tokens_per_step, shown):
    assert times(speedup, tokens_per_step) == shown


@pytest.mark.parametrize(
    ("speed", "shown"),
    [(0.0, "-"), (1.14, "1.1"), (2.06, "2.1"), (9.97, "10"), (1234.5, "1,234")],
)
def test_a_speed_is_shown_with_two_digits_or_more(speed, shown):
    assert rate(speed) == shown


def test_the_table_of_kernel_timings(capsys):
    """`tune` shows it on Macs only."""
    whole = Timing("whole forward", {1: 1e-2, 16: 5e-2}, {1: 2e-2, 16: 3e-2})
    timings = [whole, Timing("attention", {16: 5e-3}, {16: 4e-3})]
    Console(width=100).print(_kernel_table(timings))
    *_, layer, forward = capsys.readouterr().out.splitlines()
    assert "10/20" in layer and "50/30" in layer and forward.split()[-2:] == ["-", "5/4"]


@pytest.fixture
def speeds(monkeypatch, tmp_path):
    """Tokens per second for each size of command buffers, as if measured.

    No environment variables are set.
    """
    speeds = {None: 50.0, 100: 50.5, 200: 60.0, 400: 0.0}
    file = tmp_path / "kernels" / "buffers.json"
    monkeypatch.setattr(command_buffers, "_file", lambda: file)
    monkeypatch.setattr(command_buffers.os, "environ", {})
    monkeypatch.setattr(command_buffers, "_tokens_per_second", lambda options, size: speeds[size])
    return speeds


def applied():
    """The environment variables that are set before MLX starts."""
    environment = command_buffers.os.environ
    apply_fastest(environment)
    return {name: environment[name] for name in command_buffers.NAMES if name in environment}


def test_the_fastest_size_of_command_buffers_is_applied(speeds):
    assert applied() == {}, "nothing has been measured"
    assert find_fastest(["--model", "a"]) == speeds
    assert applied() == dict.fromkeys(command_buffers.NAMES, "200")


def test_sizes_of_command_buffers_are_measured_in_turns(speeds, monkeypatch):
    measured = []

    def measure(options, size):
        measured.append(size)
        return speeds[size]

    monkeypatch.setattr(command_buffers, "_tokens_per_second", measure)
    find_fastest(["--model", "a"])
    assert measured == [*speeds, *speeds]


def test_a_small_gain_by_other_command_buffers_is_not_worth_it(speeds):
    speeds[200] = 50.6
    find_fastest([])
    assert applied() == {}


def test_the_users_command_buffers_are_left_as_they_are(speeds):
    find_fastest([])
    command_buffers.os.environ["MLX_MAX_OPS_PER_BUFFER"] = "7"
    assert applied() == {"MLX_MAX_OPS_PER_BUFFER": "7"}


def test_measurements_with_another_mlx_are_not_applied(speeds, monkeypatch):
    find_fastest([])
    monkeypatch.setattr(command_buffers, "installed", lambda package: "another")
    assert applied() == {}


def test_the_speed_of_a_command_buffer_size_is_measured_in_a_separate_process(pair):
    assert command_buffers._tokens_per_second([*pair], 200) > 0
    assert command_buffers._tokens_per_second(["--model", "/nowhere"], None) == 0
