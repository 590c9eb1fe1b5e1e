"""Kernels that do not compile, or compute something else, are left to MLX, and no others."""

import warnings

import families
import mlx.core as mx
import pytest
import tinymodels
from kernel_check import on_gpu_or_emulator
from kernel_models import Launches, Recorder, half_precision, quick_factory
from program import run

import dflash_mlx as dm
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels import choose
from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.kernels.selfcheck import KernelCheckFailed, KernelChecks
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.loading import kernel_plan, load
from dflash_mlx.loading.kernel_plan import begin_checks, candidates
from dflash_mlx.traces import Traces

pytestmark = on_gpu_or_emulator

COMPILER = """[metal::Device] Unable to build metal library from source
program_source:41:9: warning: unused variable 'a'
program_source:52:13: error: use of undeclared identifier 'fragment'
"""


def broken_where(concerns, wrong):
    """A factory whose kernels fail in the calls that `concerns` is true of.

    concerns: of a kernel's name and the keywords of a call.
    wrong:    what becomes of its results there.
    """
    return Launches(
        change=lambda name, call, results: wrong(results) if concerns(name, call) else results
    )


def named(prefix):
    return lambda name, given: name.startswith(prefix)


def with_part(prefix, part):
    """Calls of these kernels whose names have a part."""
    return lambda name, given: name.startswith(prefix) and part in name


def does_not_compile(results):
    raise RuntimeError(COMPILER)


def too_many_threads(results):
    raise ValueError("Thread group size (512) is greater than the maximum allowed (448).")


def slightly_off(results):
    return [result * 1.05 for result in results]


def one_element_off(results):
    first = results[0].reshape(-1)
    first[-1] = first[-1] + 1
    return [first.reshape(results[0].shape), *results[1:]]


def infinite(results):
    return [results[0] + float("inf"), *results[1:]]


def not_a_number(results):
    return [results[0] * float("nan"), *results[1:]]


def wired(family, factory, bits=4, exact=False):
    """A random target, wired as `load` does it where all of ours won."""
    config = families.CONFIGS[family]
    target = dm.Target(
        half_precision(family, bits),
        tokenizer=families.CharacterTokenizer(),
        config=config,
        name=family,
    )
    kernels = Kernels(factory)
    rows = candidates(target)
    begin_checks(kernels)
    target.kernel_plan = swap_layers(
        target.model, config=config, kernels=kernels, rows=rows, exact=exact
    )
    return target


def answer(target, kv_bits=None):
    """Verify chains and trees of two sizes after a prompt. Returns the logits."""
    logits = []
    for rows in (3, 16):
        for parents in ((), [(node - 1) // 2 if node else -1 for node in range(rows)]):
            session = target.start(kv_bits=kv_bits)
            list(session.prefill(families.random_prompt(3, seed=1)))
            logits.append(session.verify(dm.Proposal([7] * rows, tuple(parents)))[0])
            session.commit([0, 1])
    mx.eval(logits)
    return mx.concatenate(logits)


def failed_checks(family, factory, bits=4, exact=False, kv_bits=None):
    """What failed while a random model verified."""
    target = wired(family, factory=factory, bits=bits, exact=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer(target, kv_bits)
    return target.kernel_plan.kernels.checks.failed


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3", 8), ("qwen3_5", 4), ("qwen3_moe", None), ("gpt_oss", 4)]
)
def test_nothing_is_found_where_all_is_well(family, bits):
    assert failed_checks(family, quick_factory(), bits, exact=family == "qwen3_5") == {}


ATTENTION = "attention 4/2 heads of 64 in bfloat16, "
# family, what is broken, and what the names of all that is left to MLX have in common
CASES = {
    "products": ("qwen3", named("verify_matmul_affine"), "rows in bfloat16 by"),
    "gate and up": ("qwen3", with_part("verify_matmul", "gate_up"), "as gate and up"),
    "gate and up of experts": (
        "qwen3_moe",
        named("verify_matmul_moe_affine_gate_up"),
        "as gate and up",
    ),
    "experts": ("qwen3_moe", named("verify_matmul_moe_affine"), " of "),
    "fused": (
        "qwen3",
        named("verify_matmul_affine_3"),
        "g32 bfloat16 and 128x64",
    ),
    "attention": ("qwen3", named("block_attention"), ATTENTION),
    "trees": ("gpt_oss", with_part("block_attention", "tree"), "a tree of"),
    "sinks": ("gpt_oss", with_part("block_attention_merge", "sinks"), "with sinks"),
}


@pytest.mark.parametrize(
    ("family", "concerns", "name", "wrong"),
    [
        (*case, (slightly_off, does_not_compile)[index % 2])
        for index, case in enumerate(CASES.values())
    ],
    ids=CASES.keys(),
)
def test_what_is_broken_is_found_when_it_is_used_and_nothing_else(family, concerns, name, wrong):
    """MLX's run in its place: the logits are those of a model without ours."""
    target = wired(family, broken_where(concerns, wrong))
    with pytest.warns(UserWarning, match="a kernel of ours is broken here and left out"):
        logits = answer(target)
    problems = target.kernel_plan.kernels.checks.failed
    assert problems and all(name in key for key in problems), problems
    words = "does not run (program_source:52:13: error: use of undeclared identifier 'fragment')"
    if wrong is not does_not_compile:
        words = "differs from its reference by"
    assert all(words in problem for problem in problems.values())
    stock = half_precision(family), families.CONFIGS[family]
    expected = answer(
        dm.Target(stock[0], tokenizer=families.CharacterTokenizer(), config=stock[1], name=family)
    )
    if family == "qwen3":  # a rounding changes a router's choice
        assert mx.abs(logits - expected).max() < 0.1 * mx.abs(expected).max()
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        answer(target)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (too_many_threads, "does not run (Thread group size (512) is greater than"),
        (one_element_off, "differs from its reference by"),
        (not_a_number, "differs from its reference by nan"),
        (infinite, "differs from its reference by inf"),
        (lambda results: [results[0][:, :-1]], "does not run|gives"),
    ],
)
def test_every_way_to_fail_is_found(wrong, words):
    broken = with_part("verify_matmul_affine", "gate_up")
    problems = failed_checks("qwen3", broken_where(broken, wrong)).values()
    assert problems
    assert all(any(word in problem for word in words.split("|")) for problem in problems)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_nobody_asked_for_is_not_compiled(bits):
    """Quantized keys, trees, other numbers of rows: each is checked with its first use."""
    recorder = Recorder()
    target = wired("qwen3", recorder)
    checks = target.kernel_plan.kernels.checks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zeros are not what a reference gives
        for rows, kv_bits in ((4, None), (4, bits), (9, None)):
            checks.failed.clear()
            target.start(kv_bits=kv_bits).verify(dm.Proposal([7] * rows))
            attention = [key for key in checks.failed if key.startswith("attention")]
            assert len(attention) == 1 and f"a chain of {rows}" in attention[0]
            assert (f"over {bits}-bit keys" in attention[0]) == (kv_bits is not None)
    assert not any("tree" in wrapper.name for wrapper in recorder.wrappers.values())


@pytest.fixture
def folder(tmp_path):
    return str(tinymodels.save_target(tmp_path, "qwen3", head_dim=64))


def test_a_second_command_compiles_what_its_answer_launches(monkeypatch, tmp_path, folder):
    """The timings and verdicts are on disk: it checks nothing, and asks for no trees or kv_bits."""
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    every = candidates(dm.load_target(folder, bits=4, kernels="off"))
    won = {key: rows - {16} for key, rows in every.items()}  # not exact by default
    monkeypatch.setattr(kernel_plan, "read_choices", lambda forms: won)
    runs: list[Launches] = []

    def on_metal(*_):
        runs.append(Launches())
        kernels = Kernels(runs[-1])
        kernels.on_device = True  # as Metal's are
        return kernels

    monkeypatch.setattr(load, "_kernels", on_metal)
    monkeypatch.setattr(Traces, "call", lambda *args: None)  # no trace can hold emulated kernels
    dm.load_target(folder, bits=4)
    assert not runs[0].counts, "a load launches nothing"
    texts = []
    command = ["generate", "aba", "--model", folder, "--target-bits", 4, "--max-tokens", 5]
    for _ in range(3):
        done = run(*command, "--draft", "lookup")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    first, second, third = ([launched.counts, launched.libraries] for launched in runs[1:])
    assert second == third and sum(first[0].values()) > sum(second[0].values())
    assert texts[0] == texts[1] == texts[2] and second[1] <= first[1]
    # Products of one matrix, of three, and gated; both passes of attention.
    assert len(second[1]) <= 5 and not any("tree" in name for name in second[1])


def test_exact_decoding_does_without_no_kernel(folder, monkeypatch):
    broken = broken_where(named("block_attention_merge"), slightly_off)
    load = dict(bits=4, group_size=32, metal_kernel=broken)
    with pytest.raises(KernelError, match="Exact decoding needs our kernels: attention 4/2 heads"):
        dm.load_target(folder, **load, kernels="exact")
    free = candidates(dm.load_target(folder, bits=4, group_size=32, kernels="off"))
    monkeypatch.setattr(kernel_plan, "read_choices", lambda forms: free)
    with pytest.warns(UserWarning, match="Exact decoding needs our kernels"):
        assert not dm.load_target(folder, **load).kernel_plan.exact


def careless():
    """Kernels that are right, but round otherwise where several rows share a call."""

    def coarse(results):
        return [(y.view(mx.uint32) & 0xFFFFFFF0).view(mx.float32) for y in results]

    def concerns(name, given):
        x = given["inputs"][0]
        return name.startswith("verify_matmul_affine_float") and x.size > x.shape[-1]

    return broken_where(concerns, coarse)


def test_an_exact_load_compares_the_rows_of_the_model(folder, monkeypatch):
    load = dict(bits=4, group_size=32, metal_kernel=careless())
    with pytest.raises(KernelError, match="row 1 of 16 that .* verifies has other bits here"):
        dm.load_target(folder, **load, kernels="exact")
    # Where nobody asked, the model is loaded all the same, and drafts are not taken for exact.
    with monkeypatch.context() as patch:
        model = dm.load_target(folder, bits=4, group_size=32, kernels="off")
        free = candidates(model)
        patch.setattr(kernel_plan, "read_choices", lambda forms: free)
        with pytest.warns(UserWarning, match="has other bits here than alone"):
            assert not dm.load_target(folder, **load).kernel_plan.exact


def test_a_check_sends_rows_to_experts_of_their_own():
    """Whatever the rows are that are about to be multiplied."""
    routes = []

    def factory(**definition):
        def launch(inputs, output_shapes, output_dtypes, **call):
            routes.append(inputs[-1].reshape(16, 4).tolist())
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    checks = KernelChecks()
    checks.passed = set()
    with pytest.raises(KernelCheckFailed), pytest.warns(UserWarning, match="64 of 32x8x16"):
        VerifyMatmulMoe(factory, checks=checks)(
            mx.ones((16, 16)), mx.ones((32, 8, 16)), experts=mx.zeros((16, 4), mx.uint32)
        )
    [checked] = routes
    assert len({tuple(sorted(row)) for row in checked}) > 8
    assert all(len(set(row)) == 4 for row in checked)
