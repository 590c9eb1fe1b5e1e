"""Kernels are chosen by timing verifications, here with a clock that counts calls and launches."""

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


class LaunchClock(Launches):
    """A simulated clock, advanced by each launch of our kernels. They compute nothing.

    Args:
        seconds_of: gives the seconds of a launch, from its name and call.
    """

    def __init__(self, seconds_of) -> None:
        super().__init__(Recorder(), self.advance)
        self.now = 0.0
        self.seconds_of = seconds_of

    def advance(self, name, call, results):
        self.now += self.seconds_of(name, call)
        return results


class SimulatedStopwatch(Stopwatch):
    """A stopwatch with a simulated clock, which each timed call advances by `step` seconds."""

    def __init__(self, clock: LaunchClock, seconds: float, step: float) -> None:
        super().__init__(seconds, 1, lambda: clock.now)
        self.simulated_clock = clock
        self.step = step
        self.calls = 0

    def both(self, stock, ours, *args):
        return super().both(partial(self.call, stock), partial(self.call, ours), *args)

    def call(self, run):
        self.calls += 1
        self.simulated_clock.now += self.step
        results = run()
        assert all(array.size for array in results), "the results are not those of a whole forward"
        return results


@pytest.fixture(autouse=True)
def small_depths_and_own_cache(monkeypatch, tmp_path):
    """Attention is timed over 20 and 40 keys, and choices are stored in a temporary folder."""
    monkeypatch.setattr(autotune, "DEPTHS", (20, 40))
    monkeypatch.setattr(kernel_plan, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)


def target_and_stopwatch(seconds_of, seconds=1e6, step=1.0, **changes):
    """A target, a simulated clock, and a stopwatch that reads the clock."""
    config = families.CONFIGS["qwen3"] | changes
    target = dm.Target(
        half_precision("qwen3", **changes),
        tokenizer=families.CharacterTokenizer(),
        config=config,
        name="qwen3",
    )
    clock = LaunchClock(seconds_of)
    return target, clock, SimulatedStopwatch(clock, seconds, step)


def constant_times(products, attention, far=None, *, layers=2, **settings):
    """A target, clock and stopwatch with constant seconds per launch.

    Args:
        products: the seconds of a matrix product. Negative ones make ours faster than MLX's.
        attention: the seconds of attention.
        far: those of attention over 40 keys and more; None: the same.
        layers: the number of the target's layers.
        settings: `seconds` and `step` of `target_and_stopwatch`.
    """

    def seconds_of(name, call):
        if not name.startswith("block_attention"):
            return products
        if "merge" in name:
            return 0.0
        keys = call["inputs"][1].shape[2]
        return far if far is not None and keys >= 40 else attention

    return target_and_stopwatch(seconds_of, **settings, num_hidden_layers=layers)


@pytest.mark.parametrize(
    ("products", "attention", "far", "wins"),
    [
        (-0.01, -0.01, -0.1, {"products", "near", "far"}),
        (0.01, 0.01, 0.1, set()),
        (-0.02, 0.01, 0.1, {"products"}),  # all of ours lose, but win without attention
        (0.01, -0.2, 0.1, {"near"}),
        (0.05, -0.2, 0.1, {"near"}),  # all of ours together lose
        (-0.01, -0.01, 0.1, {"products", "near"}),
        (0.01, 0.01, -0.1, {"far"}),
        (-0.0002, -0.0002, -0.0002, set()),  # too small a gain
    ],
)
def test_a_group_of_kernels_is_used_if_whole_verifies_get_faster(products, attention, far, wins):
    """Groups: matrix products, and attention after few and after many keys."""
    target, clock, stopwatch = constant_times(products, attention, far)
    classes = [type(part) for part in target.model.modules()]
    rows, timings = time_verify_steps(target, Kernels(clock), stopwatch)
    assert [type(part) for part in target.model.modules()] == classes and target.kernel_plan is None
    uses = {"products": set(), "near": set(), "far": set()}
    for key, row_counts in rows.items():
        group = "products"
        if key.startswith("attention"):
            group = "near" if key.endswith(" at 20") else "far"
        uses[group].add(bool(row_counts))
    assert uses == {group: {group in wins} for group in uses}
    assert all(sorted(timing.ours) == list(ROWS) for timing in timings)
    assert set(rows) == set(candidates(target))


@pytest.mark.parametrize(("step", "rows"), [(0.001, set(ROWS)), (0.1, {16, 4, 8}), (2.0, set())])
def test_timing_a_model_of_36_layers_ends_in_3_seconds(step, rows):
    """After four further calls at most. Row counts that were not timed use MLX.

    A call takes `step` seconds, and at least the counts `rows` are timed, the most common first.
    Further calls: those that began in time, and a first turn, in which kernels may compile.
    """
    target, clock, stopwatch = constant_times(
        -step / 1000, -step / 1000, seconds=3.0, step=step, layers=36
    )
    chosen_rows, [whole, *_] = time_verify_steps(target, Kernels(clock), stopwatch)
    assert clock.now <= 3.0 + 4 * step and rows <= set(whole.ours)
    assert all(counts <= choose.chosen(whole.ours, 64) for counts in chosen_rows.values())
    assert any(chosen_rows.values()) == bool(rows)


def test_results_are_computed_while_they_are_timed(monkeypatch):
    """MLX is lazy: without an evaluation, only the building of a graph would be timed."""
    evaluated = []
    original_eval = mx.eval

    def recording_eval(*arrays):
        evaluated.extend(arrays)
        original_eval(*arrays)

    monkeypatch.setattr(mx, "eval", recording_eval)
    results = [[mx.ones(4) + 1], [mx.ones(4) + 2]]
    Stopwatch(10.0, 1).both(lambda: results[0], lambda: results[1])
    assert [id(arrays) for arrays in evaluated] == [id(arrays) for arrays in results * 2]


def test_compiling_does_not_count_as_timing():
    """Kernels that compile for a minute in the first turn are then timed for all of 3 seconds."""
    now = [0.0]
    calls = []
    watch = Stopwatch(3.0, 2, lambda: now[0])

    def call():
        calls.append(now[0])
        now[0] += 60.0 if len(calls) <= 2 else 0.25
        return []

    assert watch.both(call, call) == (0.25, 0.25)
    assert watch.both(call, call) == (0.25, 0.25), "1.5 of 3 seconds have passed"
    assert watch.both(call, call) is None
    assert len(calls) < 18, "calls went on after 3 seconds"


def test_preparing_a_turn_is_not_timed():
    """The third argument of `both` runs before each turn."""
    now = [0.0]
    watch = Stopwatch(1e9, 3, lambda: now[0])

    def passing(seconds):
        now[0] += seconds
        return []

    seconds = watch.both(
        lambda: passing(2.0),
        lambda: passing(1.0),
        lambda turn: passing(7.0 + turn),
    )
    assert seconds == (2.0, 1.0)


@pytest.mark.parametrize(("products", "wins"), [(-0.05, True), (0.05, False)])
def test_a_drafter_is_timed_at_its_first_load_only(products, wins, monkeypatch):
    """The second load reads the stored choice."""
    monkeypatch.setattr(kernel_plan, "begin_checks", lambda kernels: None)
    _, clock, stopwatch = constant_times(products, 0.0)
    for again in (False, True):
        drafter = half_precision("qwen3")
        calls = stopwatch.calls
        use_drafter_kernels(drafter, Kernels(clock), stopwatch)
        assert (stopwatch.calls == calls) == again
        assert (type(drafter.lm_head) in SWAPS.values()) == wins


def test_a_model_is_timed_at_the_first_load_that_chooses(monkeypatch):
    """`exact=True` chooses nothing. Later loads read the stored choices."""
    monkeypatch.setattr(kernel_plan, "begin_checks", lambda kernels: None)
    target, clock, stopwatch = constant_times(-0.01, -0.01)
    exact = use_kernels(target, kernels=Kernels(clock), exact=True, stopwatch=stopwatch)
    assert exact.kernel_plan.exact
    assert not stopwatch.calls

    target, clock, stopwatch = constant_times(-0.01, -0.01)
    fast = use_kernels(target, kernels=Kernels(clock), exact=False, stopwatch=stopwatch)
    rows = fast.kernel_plan.rows
    calls = stopwatch.calls
    assert calls and fast.kernel_plan.layers
    assert rows == read_choices(forms(target)) and all(rows.values())

    target, *_ = constant_times(0.0, 0.0)
    default = use_kernels(target, kernels=Kernels(clock), exact=None, stopwatch=stopwatch)
    assert default.kernel_plan.exact, (
        "our kernels won at every row count, so exact decoding is free"
    )
    assert stopwatch.calls == calls


@pytest.mark.parametrize(
    ("on", "off", "used", "wins"),
    [
        (-0.05, -0.04, True, True),
        (-0.04, -0.05, False, True),
        (-0.05, 0.05, True, True),
        (0.04, 0.05, True, False),
        (-0.05, -0.04, None, True),  # a chip without tensor units
    ],
)
def test_the_stopwatch_decides_between_tensor_units_and_tiles(on, off, used, wins):
    """And between the faster of the two and MLX.

    `on` and `off` are the seconds of a product on and off tensor units; `used` tells whether the
    choice is tensor units, and `wins` whether it is a kernel of ours.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}

    def seconds_of(name, call):
        return on if "tensor" in name else off

    target, clock, stopwatch = target_and_stopwatch(seconds_of, **sizes)
    rows, _ = time_verify_steps(target, Kernels(clock, tensor_units=used is not None), stopwatch)
    keys = {matrix.key for _, _, matrix in matrices(target.model, target.config)}
    assert {tensor_key(key) in rows for key in keys} == {bool(used)}
    assert {bool(rows[key]) for key in keys} == {wins}
