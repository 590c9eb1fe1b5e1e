"""A kernel that fails in the middle of an answer: MLX's go on, and no token is lost."""

from dataclasses import replace

import families
import mlx.core as mx
import pytest
import tinymodels
from crowd import Knowing
from kernel_check import on_gpu_or_emulator
from kernel_models import Launches, float_target, half_precision

import dflash_mlx as dm
from dflash_mlx.drafter.lookup import CombinedDrafter
from dflash_mlx.errors import KernelError, SettingsError
from dflash_mlx.kernels.modules import Kernels, wire
from dflash_mlx.targets import Target
from dflash_mlx.targets.autotune import candidates

pytestmark = on_gpu_or_emulator

PROMPTS = [families.random_prompt(length, seed=length) for length in (30, 21, 12)]
SETTINGS = {"max_tokens": 14, "block_size": 6}
when = pytest.mark.parametrize("lazily", [False, True], ids=["at once", "when computed"])


class Refusing(Launches):
    """Kernels whose launches are refused from some time on."""

    def __init__(self, lazily: bool) -> None:
        super().__init__()
        self.good, self.lazily = 10**9, lazily

    def refuse(self, good: int) -> None:
        """Have all launches refused after so many; where that is none, by MLX, else by us."""
        self.counts.clear()
        self.good, self.error = good, KernelError if good else ValueError

    @property
    def launched(self) -> int:
        return sum(self.counts.values())

    def __call__(self, name, **definition):
        kernel = super().__call__(name, **definition)

        def launch(**call):
            results = kernel(**call)
            if self.launched <= self.good:
                return results
            if self.lazily:  # an error of MLX's own, when the step is computed
                wrong = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()
                return [result + wrong.astype(result.dtype) for result in results]
            raise self.error("Thread group size (512) is greater than the maximum allowed (448).")

        return launch


def wired(family: str, factory: Launches) -> Target:
    """In float32, with all products and all attention of 2 rows and more on our kernels.

    A recurrence too, so that one is exact, though nobody asked for it.
    """
    model, config = half_precision(family, None, mx.float32), families.CONFIGS[family]
    target = Target(model, families.Letters(), config, family)
    ours = dict.fromkeys(candidates(target), frozenset(range(2, 17)))
    target.wiring = wire(model, config, Kernels(factory), ours, exact=family == "qwen3_5")
    return target


def knowing(target: Target, prompts: list[list[int]]) -> tuple[Knowing, list[list[int]]]:
    """A drafter that knows the plain texts, mostly, and these texts."""
    stock = float_target(target.name)
    texts = [dm.generate(stock, None, prompt, max_tokens=14).tokens for prompt in prompts]
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    return Knowing(known, target.vocab_size, 0.7, taps=(1,)), texts


@when
@pytest.mark.parametrize(
    ("family", "trees", "good"),
    [("qwen3", False, 0), ("qwen3_5", False, 60), ("gpt_oss", True, 60)],
)
def test_the_step_runs_again_on_mlx_s_kernels(family, trees, good, lazily):
    factory = Refusing(lazily)
    target = wired(family, factory)
    factory.refuse(good)
    drafter, [text] = knowing(target, PROMPTS[:1])
    drafter.branches = trees
    with pytest.warns(UserWarning, match="MLX's kernels run from now on") as said:
        assert dm.generate(target, drafter, PROMPTS[0], **SETTINGS).tokens == text
    launched = factory.launched
    assert dm.generate(target, drafter, PROMPTS[0], **SETTINGS).tokens == text
    assert len(said) == 1 and good < factory.launched == launched


@when
@pytest.mark.parametrize("good", [0, 40])
def test_all_texts_of_an_engine_go_on(good, lazily):
    factory = Refusing(lazily)
    target = wired("qwen3", factory)
    drafter, texts = knowing(target, PROMPTS)
    with pytest.warns(UserWarning) as said, dm.Engine(target, drafter) as engine:
        factory.refuse(good)
        jobs = [engine.submit(prompt, **SETTINGS) for prompt in PROMPTS]
        assert [job.result().tokens for job in jobs] == texts
    assert len(said) == 1 and "MLX's kernels run from now on" in str(said[0].message)


@when
@pytest.mark.parametrize("wrap", [lambda drafter: drafter, CombinedDrafter], ids=["alone", "both"])
def test_a_drafter_that_was_loaded_alone_goes_on_too(wrap, lazily, monkeypatch, tmp_path):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4 Max"})
    factory, target = Refusing(lazily), float_target("qwen3")
    drafter = dm.load_drafter(
        str(tinymodels.save_drafter(tmp_path, vocab_size=256, num_target_layers=4)),
        metal_kernel=factory,
    )
    text = dm.generate(target, None, PROMPTS[0], **SETTINGS).tokens
    factory.refuse(0)
    with pytest.warns(UserWarning, match="MLX's kernels run from now on") as said:
        assert dm.generate(target, wrap(drafter), PROMPTS[0], **SETTINGS).tokens == text
    launched = factory.launched
    assert dm.generate(target, wrap(drafter), PROMPTS[0], **SETTINGS).tokens == text
    assert len(said) == 1 and 0 < factory.launched == launched


def test_exact_decoding_that_was_asked_for_ends():
    factory = Refusing(lazily=True)
    target = wired("qwen3", factory)
    target.wiring = replace(target.wiring, required=True)
    factory.refuse(0)
    with pytest.raises(RuntimeError, match="factorization failed"):
        dm.generate(target, None, PROMPTS[2], **SETTINGS)


def stubborn(tokens, logits):
    raise ValueError("a processor that accepts nothing")


def test_what_is_not_the_kernels_fault_does_not_turn_them_off():
    target = wired("qwen3", Launches())
    drafter, [_, text] = knowing(target, PROMPTS[:2])
    with pytest.raises(ValueError, match="accepts nothing"):
        dm.generate(target, drafter, PROMPTS[0], logits_processors=[stubborn], **SETTINGS)
    with dm.Engine(target, drafter) as engine:
        wrong = engine.submit(PROMPTS[0], logits_processors=[stubborn], **SETTINGS)
        right = engine.submit(PROMPTS[1], **SETTINGS)
        with pytest.raises(ValueError, match="accepts nothing"):
            wrong.result()
        assert right.result().tokens == text
    assert target.wiring is not None and target.wiring.kernels.active


class Wide:
    """Drafts as many rows as it may."""

    tap_layers = ()

    def start(self, target, sampler):
        return self

    def extend(self, taps):
        pass

    def propose(self, anchor, width):
        return dm.Proposal([anchor] * width)


def test_rows_that_exact_decoding_does_not_take_are_refused_not_decoded_otherwise():
    target = wired("qwen3_5", Launches())
    with pytest.raises(SettingsError, match="at most 64 rows"):
        dm.generate(target, Wide(), PROMPTS[2], max_tokens=99, block_size=65)
    with dm.Engine(target, Wide()) as engine:
        job = engine.submit(PROMPTS[2], max_tokens=99, block_size=65)
        with pytest.raises(SettingsError, match="at most 64 rows"):
            job.result()
    assert target.wiring is not None and target.wiring.kernels.active
