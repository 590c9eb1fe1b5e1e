"""A kernel that fails in the middle of an answer ends that answer with a KernelError."""

import families
import mlx.core as mx
import pytest
import tinymodels
from kernel_check import on_gpu_or_emulator
from kernel_models import Launches, float_target, half_precision
from request_set import TextOracle

import dflash_mlx as dm
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.loading import kernel_plan
from dflash_mlx.loading.kernel_plan import candidates
from dflash_mlx.targets import Target

pytestmark = on_gpu_or_emulator

PROMPTS = [families.random_prompt(length, seed=length) for length in (30, 21, 12)]
SETTINGS = {"max_tokens": 14, "block_size": 6}
REFUSED = "Thread group size (512) is greater than the maximum allowed (448)."
MESSAGE = r'The kernel \w+ fails \(Thread group size .*\(448\)\)\. kernels="off" \(--kernels off\)'
both_times = pytest.mark.parametrize("lazily", [False, True], ids=["at once", "when computed"])


class FailingLaunches(Launches):
    """Kernels whose launches fail after a number of them, at once or when results are computed."""

    def __init__(self, lazily: bool) -> None:
        super().__init__(change=self.change_results)
        self.successes = 10**9
        self.lazily = lazily

    def fail_after(self, successes: int) -> None:
        """Let that many launches from now on succeed, and the later ones fail."""
        self.counts.clear()
        self.successes = successes

    def change_results(self, name, call, results):
        if sum(self.counts.values()) <= self.successes:
            return results
        if self.lazily:
            # Adds a result that MLX fails to compute: the inverse of a matrix of zeros.
            failing = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()
            return [result + failing.astype(result.dtype) for result in results]
        raise ValueError(REFUSED)

    def raises(self):
        """The error expected: MLX's, or ours if the next launch computes the failing result."""
        if self.lazily:
            return pytest.raises((RuntimeError, KernelError), match="factorization failed")
        return pytest.raises(KernelError, match=MESSAGE)


def target_on_kernels(family: str, factory: Launches) -> Target:
    """A float32 target with all products and attention of 2 to 16 rows on our kernels."""
    model = half_precision(family, None, mx.float32)
    config = families.CONFIGS[family]
    target = Target(model, tokenizer=families.CharacterTokenizer(), config=config, name=family)
    ours = dict.fromkeys(candidates(target), frozenset(range(2, 17)))
    target.kernel_plan = swap_layers(
        model, config=config, kernels=Kernels(factory), rows=ours, exact=family == "qwen3_5"
    )
    return target


def oracle_of(target: Target, prompts: list[list[int]]) -> tuple[TextOracle, list[list[int]]]:
    """The plain texts after the prompts, and a drafter whose drafts are right 7 times in 10."""
    stock = float_target(target.name)
    texts = [dm.generate(stock, None, prompt, max_tokens=14).tokens for prompt in prompts]
    texts_with_prompts = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    return TextOracle(texts_with_prompts, target.vocab_size, 0.7, taps=(1,)), texts


@both_times
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_failing_kernel_ends_the_answer_and_the_next_one_is_right(family, lazily):
    factory = FailingLaunches(lazily)
    target = target_on_kernels(family, factory)
    drafter, [text] = oracle_of(target, PROMPTS[:1])
    factory.fail_after(60)  # in the middle of the answer
    with factory.raises():
        dm.generate(target, drafter, PROMPTS[0], **SETTINGS)
    factory.fail_after(10**9)
    assert dm.generate(target, drafter, PROMPTS[0], **SETTINGS).tokens == text
    assert target.kernel_plan is not None


@both_times
def test_a_failing_kernel_ends_an_engines_jobs_and_later_ones_are_right(lazily):
    factory = FailingLaunches(lazily)
    target = target_on_kernels("qwen3", factory)
    drafter, texts = oracle_of(target, PROMPTS)
    with dm.Engine(target, drafter) as engine:
        factory.fail_after(0)
        jobs = [engine.submit(prompt, **SETTINGS) for prompt in PROMPTS]
        for job in jobs:
            with factory.raises():
                job.result()
        factory.fail_after(10**9)
        jobs = [engine.submit(prompt, **SETTINGS) for prompt in PROMPTS]
        assert [job.result().tokens for job in jobs] == texts


def test_a_failing_kernel_of_a_drafter_ends_the_answer(monkeypatch, tmp_path):
    rows = frozenset(range(2, 17))
    monkeypatch.setattr(kernel_plan, "read_choices", lambda forms: dict.fromkeys(forms, rows))
    monkeypatch.setattr(kernel_plan, "begin_checks", lambda kernels: None)
    factory = FailingLaunches(lazily=False)
    target = float_target("qwen3")
    drafter = dm.load_drafter(
        str(tinymodels.save_drafter(tmp_path, vocab_size=256, num_target_layers=4)),
        metal_kernel=factory,
    )
    factory.fail_after(0)
    with factory.raises():
        dm.generate(target, drafter, PROMPTS[0], **SETTINGS)
