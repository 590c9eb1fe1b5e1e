"""Kernels are chosen by a stopwatch, whose clock counts calls and launches here."""

from functools import partial
from itertools import product

import families
import pytest
from kernel_calls import Recorder
from kernel_models import Launches, half_precision, quick_factory

import dflash_mlx as dm
from dflash_mlx.kernels import choose
from dflash_mlx.kernels.choose import ROWS, read_choices
from dflash_mlx.kernels.modules import SWAPS, Kernels
from dflash_mlx.loading import wiring
from dflash_mlx.loading.wiring import wire_drafter, wire_target
from dflash_mlx.targets import autotune as module
from dflash_mlx.targets import parts
from dflash_mlx.targets.autotune import FORWARD, Stopwatch, autotune, candidates, forms

EVERYWHERE, ALONE, TOGETHER = (-0.05, -0.01), (-0.05, 0.01), (0.05, -0.01)


class Clock(Launches):
    """A clock that launches of ours move by `alone` or, in a wired target's forward, `together`.

    The launches compute nothing. With `deep_only` those alone that read fewer than 40 keys lose.
    """

    deep_only = False

    def __init__(self, target: dm.Target, alone: float, together: float) -> None:
        super().__init__(Recorder())
        self.target, self.now, self.alone, self.together = target, 0.0, alone, together

    def __call__(self, name, **definition):
        kernel = super().__call__(name, **definition)

        def launch(**given):
            apart = self.target.wiring is None
            if apart and self.deep_only and given["inputs"][1].shape[-2] < 40:
                self.now += 1.0
            else:
                self.now += self.alone if apart else self.together
            return kernel(**given)

        return launch


class Counted(Stopwatch):
    """A stopwatch whose clock every call moves by `step` seconds."""

    def __init__(self, clock: Clock, seconds: float, step: float) -> None:
        super().__init__(seconds, 1, lambda: clock.now)
        self.moved, self.step, self.calls = clock, step, 0

    def both(self, stock, ours, *args, **named):
        return super().both(*(partial(self.call, one) for one in (stock, ours)), *args, **named)

    def call(self, one):
        self.calls += 1
        self.moved.now += self.step
        return one()


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "DEPTHS", (20, 40))
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)


def timed(launch, seconds=1e6, step=1.0, layers=2):
    """A target, a clock, and a stopwatch with it."""
    config = families.CONFIGS["qwen3"] | {"num_hidden_layers": layers}
    model = half_precision("qwen3", num_hidden_layers=layers)
    target = dm.Target(model, families.Letters(), config, "qwen3")
    clock = Clock(target, *launch)
    return target, clock, Counted(clock, seconds, step)


@pytest.mark.parametrize(
    ("launch", "wins"), [(EVERYWHERE, True), (ALONE, False), (TOGETHER, False)]
)
def test_the_whole_forward_decides(launch, wins):
    """A kernel that wins alone and loses there is not used, nor one that loses alone."""
    target, clock, stopwatch = timed(launch)
    classes = [type(part) for part in target.model.modules()]
    rows, timings = autotune(target, Kernels(clock), frozenset(), stopwatch)
    assert [type(part) for part in target.model.modules()] == classes and target.wiring is None
    assert rows and {bool(of) for of in rows.values()} == {wins}
    assert {of for of in rows.values()} <= {
        frozenset(),
        *map(frozenset, (range(1, 17), range(1, 65))),
    }
    [forward] = [one for one in timings if one.key == FORWARD]
    assert sorted(forward.stock) == (list(ROWS) if launch is not TOGETHER else [])


@pytest.mark.parametrize(("together", "wins"), [(-0.01, True), (0.05, False)])
def test_attention_that_wins_over_many_keys_takes_part_in_the_forward(together, wins):
    target, clock, stopwatch = timed((-0.2, together))
    clock.deep_only = True
    keys = {key for key in forms(target) if not key.startswith("attention")}
    rows, _ = autotune(target, Kernels(clock), frozenset(keys), stopwatch)
    assert [key for key in rows if rows[key]] == [key for key in rows if wins and " at 40" in key]
    assert rows


def test_what_is_broken_takes_no_part():
    target, clock, stopwatch = timed(EVERYWHERE)
    [key] = {key for key in forms(target) if key.startswith("attention")}
    rows, timings = autotune(target, Kernels(clock), frozenset({key}), stopwatch)
    assert rows and not any(one.startswith(key) for one in [*rows, *(t.key for t in timings)])
    assert not any(name.startswith("block_attention") for name in clock.counts)


@pytest.mark.parametrize(("step", "forwards"), [(0.001, 8), (0.02, 4), (0.7, 0)])
def test_it_ends_in_time_with_36_layers(step, forwards):
    """3 seconds and one call at most, however long a call takes; what was not timed is MLX's."""
    target, clock, stopwatch = timed((-step / 20, -step / 1000), 3.0, step, layers=36)
    rows, timings = autotune(target, Kernels(clock), frozenset(), stopwatch)
    assert clock.now <= 3.0 + step
    [forward] = [one for one in timings if one.key == FORWARD]
    assert len(forward.stock) >= forwards and bool(forward.stock) == bool(forwards)
    assert all(of <= choose.chosen(forward.stock, 64) for of in rows.values())
    assert stopwatch.calls < 600 and any(rows.values()) == bool(forwards)


@pytest.mark.parametrize(
    ("step", "alone", "together"), [(2.0, 1, 1), (0.02, 1, 1), (0.01, -1, 1), (0.02, 1, -1)]
)
def test_the_guess_decides_at_rows_that_were_not_timed(step, alone, together):
    """alone, together: 1 where ours win, -1 where they lose."""
    launch = -alone * step / 20, -together * step / 1000
    target, clock, stopwatch = timed(launch, 3.0, step, layers=36)
    guess = frozenset({4, 6, 12, 16})
    guessed = dict.fromkeys(candidates(target), guess)
    found, [*timings, forward] = autotune(target, Kernels(clock), frozenset(), stopwatch, guessed)
    assert bool(forward.ours) == (step < 1) and len(forward.ours) < len(ROWS)
    left = [timing.key for timing in timings if not timing.ours]
    assert left and all(
        (rows in found[key]) == (rows in guess and (together > 0 or rows not in forward.ours))
        for key, rows in product(left, ROWS)
    )
    whole = [found[timing.key] for timing in timings if len(timing.ours) == len(ROWS)]
    assert alone > 0 or frozenset() in whole, "it lost here, whatever was guessed"


@pytest.mark.parametrize(("alone", "wins"), [(-0.05, True), (0.05, False)])
def test_a_drafter_is_timed_once(alone, wins, monkeypatch):
    """Its own forms; those of a target with these kernels run as there, and are not timed."""
    monkeypatch.setattr(wiring, "_broken", lambda *checks: frozenset())
    target, clock, stopwatch = timed((alone, alone))
    for known in ({key: frozenset({5}) for key in candidates(target)}, {}):
        drafter, kernels = half_precision("qwen3"), Kernels(clock)
        calls, kernels.chosen = stopwatch.calls, known
        wire_drafter(drafter, kernels, stopwatch)
        assert (stopwatch.calls > calls) == (not known)
        layer = drafter.model.layers[0].mlp.down_proj
        assert (type(layer) in SWAPS.values()) == (bool(known) or wins)
        assert not (known or wins) or layer._rows == ({5} if known else set(range(1, 17)))
    drafter, calls = half_precision("qwen3"), stopwatch.calls
    wire_drafter(drafter, Kernels(clock), stopwatch)
    assert stopwatch.calls == calls and (type(drafter.lm_head) in SWAPS.values()) == wins


def test_a_model_is_timed_once(monkeypatch):
    """By the first load that chooses. The next one, also of its drafter, reads the answer."""
    monkeypatch.setattr(wiring, "_broken", lambda *checks: frozenset())
    exact, clock, stopwatch = timed((-0.05, -0.01))
    assert wire_target(exact, Kernels(clock), True, stopwatch).wiring.exact and not stopwatch.calls
    watched, own = [], parts.make_prompt_cache
    monkeypatch.setattr(parts, "make_prompt_cache", lambda of: watched.append(of) or own(of))
    target, clock, stopwatch = timed((-0.05, -0.01))
    ours = wire_target(target, Kernels(clock), False, stopwatch)
    assert len(watched) == 1, "the parts are found once"
    rows, calls = ours.wiring.rows, stopwatch.calls
    assert rows == read_choices(forms(target)) and all(rows.values())
    assert ours.wiring.layers and calls
    again, *_ = timed(EVERYWHERE)
    kernels = Kernels(quick_factory())
    assert wire_target(again, kernels, None, stopwatch).wiring.exact, "it was free at every row"
    assert stopwatch.calls == calls
    drafter = half_precision("qwen3")
    wire_drafter(drafter, kernels)
    assert drafter.model.layers[0].mlp.down_proj._rows == frozenset(range(1, 17))
