"""`dflash-mlx tune`: what it measures is what later runs read."""

import json

import mlx.core as mx
from program import run
from rich.console import Console

from dflash_mlx.bench.kernels import ShapeTiming
from dflash_mlx.cli.tune import _cost_table, _kernel_json, _kernel_table
from dflash_mlx.kernels.choose import Timing
from dflash_mlx.policy.costs import keep_costs, read_costs

ROW = ShapeTiming(
    "4096x4096 affine 4-bit g64", 36, Timing({1: 1e-4, 16: 5e-4}, {1: 2e-4, 16: 3e-4})
)


def test_costs_are_kept_until_they_are_asked_for_again(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def tuned(*options: str):
        done = run("tune", *pair, *options)
        assert done.returncode == 0, done.stderr
        return done

    def told(done) -> bool:
        return "Measuring what a round costs" in done.stderr

    begun = tuned("--json")
    first = json.loads(begun.stdout)
    chains = first["milliseconds"]["chains"]
    assert all(cost > 0 for by_rows in chains.values() for cost in by_rows.values())
    assert (first["kernels"] is None) == (not mx.metal.is_available())
    shown = tuned()  # from what was kept
    assert told(begun) and not told(shown), "a person is not kept waiting without a word"
    for by_rows in chains.values():
        told_of = [by_rows[rows] for rows in ("1", "2", "4", "8", "12", "16")]
        assert all(f"{cost:.3g}" in shown.stdout for cost in told_of)
    if first["kernels"] is None:
        assert "no Metal here, so only costs were measured" in shown.stderr
    assert not first["corrected_by_rounds"] and "corrected" not in shown.stderr
    [kept] = (tmp_path / ".cache" / "dflash-mlx" / "costs").glob("measure-*.json")
    keep_costs(kept, read_costs(kept).corrected({1: 1.0, 16: 2.0}, 16))
    assert "have corrected these figures" in " ".join(tuned().stderr.split())
    anew = json.loads(tuned("--again", "--json").stdout)
    assert anew["milliseconds"]["chains"] != chains and not anew["corrected_by_rounds"]


def test_costs_that_cannot_be_kept(pair, tmp_path, monkeypatch):
    """A file where the folder ought to be: nothing is promised."""
    (tmp_path / ".cache").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    said = run("tune", *pair).stderr
    assert "from now on" not in said and "costs cannot be written" in " ".join(said.split())


def test_figures_of_many_widths_have_a_unit_on_a_narrow_terminal(capsys):
    """Learnt costs have a figure for nearly every width, more than 80 columns hold."""
    Console(width=80).print(_cost_table({"chains": {64: dict.fromkeys(range(1, 17), 12.5)}}))
    assert capsys.readouterr().out.startswith("ms per step, by rows\n")


def test_the_table_of_timings(capsys):
    Console(width=100).print(_kernel_table([ROW]))
    printed = capsys.readouterr().out
    assert "100/200" in printed and "500/300" in printed and printed.split()[-1] == "16"
    assert _kernel_json(ROW)["ours_from"] == 16
