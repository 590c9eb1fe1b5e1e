"""Kernels are chosen by a stopwatch over whole verifies, whose clock counts calls and launches."""

from functools import partial

import families
import mlx.core as mx
import pytest
from kernel_models import Launches, Recorder, half_precision

import dflash_mlx as dm
from dflash_mlx.kernels import autotune, choose
from dflash_mlx.kernels.autotune import Stopwatch
from dflash_mlx.kernels.choose import ROWS, read_choices, tensor_key
from dflash_mlx.kernels.modules import SWAPS, Kernels
from dflash_mlx.kernels.shapes import matrices
from dflash_mlx.loading import kernel_plan
from dflash_mlx.loading.kernel_plan import (
    candidates,
    forms,
    time_verify_steps,
    use_drafter_kernels,
    use_kernels,
)


class Clock(Launches):
    """A clock that launches of ours move, which compute nothing.

    Args:
        taken: the seconds of a launch, by its name and call.
    """

    def __init__(self, taken) -> None:
        super().__init__(Recorder(), self.pass_time)
        self.now = 0.0
        self.taken = taken

    def pass_time(self, name, call, results):
        self.now += self.taken(name, call)
        return results


class Counted(Stopwatch):
    """A stopwatch whose clock every call moves by `step` seconds."""

    def __init__(self, clock: Clock, seconds: float, step: float) -> None:
        super().__init__(seconds, 1, lambda: clock.now)
        self.moved = clock
        self.step = step
        self.calls = 0

    def both(self, stock, ours, *args):
        return super().both(*(partial(self.call, run) for run in (stock, ours)), *args)

    def call(self, run):
        self.calls += 1
        self.moved.now += self.step
        results = run()
        assert all(array.size for array in results), "what is computed needs the whole forward"
        return results


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(autotune, "DEPTHS", (20, 40))
    monkeypatch.setattr(kernel_plan, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)


def started(taken, seconds=1e6, step=1.0, **changes):
    """A target, a clock, and a stopwatch with it."""
    config = families.CONFIGS["qwen3"] | changes
    target = dm.Target(
        half_precision("qwen3", **changes),
        tokenizer=families.CharacterTokenizer(),
        config=config,
        name="qwen3",
    )
    clock = Clock(taken)
    return target, clock, Counted(clock, seconds, step)


def timed(products, attention, far=None, *settings, layers=2):
    """Start with a constant time per launch; `far` is that of attention over 40 keys and more."""

    def taken(name, call):
        if not name.startswith("block_attention"):
            return products
        if "merge" in name:
            return 0.0
        keys = call["inputs"][1].shape[2]
        return far if far is not None and keys >= 40 else attention

    return started(taken, *settings, num_hidden_layers=layers)


@pytest.mark.parametrize(
    ("products", "attention", "far", "wins"),
    [
        (-0.01, -0.01, -0.1, {"products", "near", "far"}),
        (0.01, 0.01, 0.1, set()),
        (-0.02, 0.01, 0.1, {"products"}),  # attention is left out, and the forward wins
        (0.01, -0.2, 0.1, {"near"}),
        (0.05, -0.2, 0.1, {"near"}),  # although all of ours together lose
        (-0.01, -0.01, 0.1, {"products", "near"}),
        (0.01, 0.01, -0.1, {"far"}),
        (-0.0002, -0.0002, -0.0002, set()),  # less than a clear gain
    ],
)
def test_whole_verifies_decide_for_each_group(products, attention, far, wins):
    target, clock, stopwatch = timed(products, attention, far)
    classes = [type(part) for part in target.model.modules()]
    rows, timings = time_verify_steps(target, Kernels(clock), stopwatch)
    assert [type(part) for part in target.model.modules()] == classes and target.kernel_plan is None
    groups = {"products": set(), "near": set(), "far": set()}
    for key, row in rows.items():
        name = "products"
        if key.startswith("attention"):
            name = "near" if key.endswith(" at 20") else "far"
        groups[name].add(bool(row))
    assert groups == {name: {name in wins} for name in groups}
    assert all(sorted(timing.ours) == list(ROWS) for timing in timings)
    assert set(rows) == set(candidates(target))


@pytest.mark.parametrize(("step", "rows"), [(0.001, set(ROWS)), (0.1, {16, 4, 8}), (2.0, set())])
def test_it_ends_in_time_with_36_layers(step, rows):
    """3 seconds and one call at most, however long a call takes; what was not timed is MLX's."""
    target, clock, stopwatch = timed(-step / 1000, -step / 1000, None, 3.0, step, layers=36)
    chosen_rows, [whole, *_] = time_verify_steps(target, Kernels(clock), stopwatch)
    assert clock.now <= 3.0 + 4 * step and rows <= set(whole.ours)
    assert all(counts <= choose.chosen(whole.ours, 64) for counts in chosen_rows.values())
    assert any(chosen_rows.values()) == bool(rows)


def test_what_is_timed_is_computed(monkeypatch):
    computed = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *x: (computed.extend(x), evaluate(*x)))
    results = [[mx.ones(4) + 1], [mx.ones(4) + 2]]
    Stopwatch(10.0, 1).both(lambda: results[0], lambda: results[1])
    assert [id(x) for x in computed] == [id(x) for x in results * 2]


def test_compiling_takes_no_time_from_timing():
    """Kernels that compile for a minute, in the first turn, are timed for the whole 3 seconds."""
    now = [0.0]
    calls = []
    watch = Stopwatch(3.0, 2, lambda: now[0])

    def call():
        calls.append(now[0])
        now[0] += 60.0 if len(calls) <= 2 else 0.25
        return []

    assert watch.both(call, call) == (0.25, 0.25)
    assert watch.both(call, call) == (0.25, 0.25), "1.5 of 3 seconds have passed"
    assert watch.both(call, call) is None and len(calls) < 18


def test_waiting_for_the_layers_is_not_timed():
    now = [0.0]
    watch = Stopwatch(1e9, 3, lambda: now[0])

    def passing(seconds):
        now[0] += seconds
        return []

    taken = watch.both(lambda: passing(2.0), lambda: passing(1.0), lambda turn: passing(7.0 + turn))
    assert taken == (2.0, 1.0)


@pytest.mark.parametrize(("products", "wins"), [(-0.05, True), (0.05, False)])
def test_a_drafter_is_timed_once(products, wins, monkeypatch):
    monkeypatch.setattr(kernel_plan, "begin_checks", lambda kernels: None)
    _, clock, stopwatch = timed(products, 0.0)
    for again in (False, True):
        drafter = half_precision("qwen3")
        calls = stopwatch.calls
        use_drafter_kernels(drafter, Kernels(clock), stopwatch)
        assert (stopwatch.calls == calls) == again
        assert (type(drafter.lm_head) in SWAPS.values()) == wins


def test_a_model_is_timed_once(monkeypatch):
    """By the first load that chooses. The next one, also of its drafter, reads the answer."""
    monkeypatch.setattr(kernel_plan, "begin_checks", lambda kernels: None)
    exact, clock, stopwatch = timed(-0.01, -0.01)
    target = use_kernels(exact, kernels=Kernels(clock), exact=True, stopwatch=stopwatch)
    assert target.kernel_plan.exact and not stopwatch.calls
    target, clock, stopwatch = timed(-0.01, -0.01)
    ours = use_kernels(target, kernels=Kernels(clock), exact=False, stopwatch=stopwatch)
    rows = ours.kernel_plan.rows
    calls = stopwatch.calls
    assert rows == read_choices(forms(target)) and all(rows.values())
    assert ours.kernel_plan.layers and calls
    again, *_ = timed(0.0, 0.0)
    assert use_kernels(
        again, kernels=Kernels(clock), exact=None, stopwatch=stopwatch
    ).kernel_plan.exact, "free at every row"
    assert stopwatch.calls == calls


@pytest.mark.parametrize(
    ("on", "off", "used", "wins"),
    [
        (-0.05, -0.04, True, True),
        (-0.04, -0.05, False, True),
        (-0.05, 0.05, True, True),
        (0.04, 0.05, True, False),
        (-0.05, -0.04, None, True),  # a chip without them is not asked
    ],
)
def test_the_stopwatch_decides_between_tensor_units_and_tiles(on, off, used, wins):
    """And between the faster of them and MLX."""
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    target, clock, stopwatch = started(lambda name, _: on if "tensor" in name else off, **sizes)
    rows, _ = time_verify_steps(target, Kernels(clock, tensor_units=used is not None), stopwatch)
    keys = {matrix.key for _, _, matrix in matrices(target.model, target.config)}
    assert {tensor_key(key) in rows for key in keys} == {bool(used)}
    assert {bool(rows[key]) for key in keys} == {wins}
