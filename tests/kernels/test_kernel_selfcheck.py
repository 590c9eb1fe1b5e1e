"""Kernels that do not compile or compute wrong results are found and replaced by MLX's."""

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

COMPILER_ERROR = """[metal::Device] Unable to build metal library from source
program_source:41:9: warning: unused variable 'a'
program_source:52:13: error: use of undeclared identifier 'fragment'
"""


def broken_factory(is_broken, break_results):
    """A factory of kernels of which some calls are broken.

    is_broken: tells whether a call is, from the kernel's name and the call's keywords.
    break_results: gives wrong results for the right ones, or raises.
    """

    def change(name, call, results):
        return break_results(results) if is_broken(name, call) else results

    return Launches(change=change)


def named(prefix, part=""):
    """Whether a kernel's name begins with a prefix and contains a part."""

    def is_broken(name, call):
        return name.startswith(prefix) and part in name

    return is_broken


def does_not_compile(results):
    raise RuntimeError(COMPILER_ERROR)


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


def target_on_kernels(family, factory, bits=4, exact=False):
    """A random target with all of our kernels, as `load` makes one where they won the timing."""
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
        binary_tree = (-1, *((node - 1) // 2 for node in range(1, rows)))
        for parents in ((), binary_tree):
            session = target.start(kv_bits=kv_bits)
            list(session.prefill(families.random_prompt(3, seed=1)))
            logits.append(session.verify(dm.Proposal([7] * rows, parents))[0])
            session.commit([0, 1])
    mx.eval(logits)
    return mx.concatenate(logits)


def failed_checks(family, factory, bits=4, exact=False, kv_bits=None):
    """The problems found while a random target verified, by the name of the check."""
    target = target_on_kernels(family, factory=factory, bits=bits, exact=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer(target, kv_bits)
    return target.kernel_plan.kernels.checks.failed


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3", 8), ("qwen3_5", 4), ("qwen3_moe", None), ("gpt_oss", 4)]
)
def test_no_problem_is_found_in_working_kernels(family, bits):
    assert failed_checks(family, quick_factory(), bits, exact=family == "qwen3_5") == {}


ATTENTION = "attention 4/2 heads of 64 in bfloat16, "
# A family, which calls are broken, and a part of the names of all checks that fail.
CASES = {
    "products": ("qwen3", named("verify_matmul_affine"), "rows in bfloat16 by"),
    "gate and up": ("qwen3", named("verify_matmul", "gate_up"), "as gate and up"),
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
    "trees": ("gpt_oss", named("block_attention", "tree"), "a tree of"),
    "sinks": ("gpt_oss", named("block_attention_merge", "sinks"), "with sinks"),
}


@pytest.mark.parametrize(
    ("family", "is_broken", "name", "break_results"),
    [  # the two ways to be broken take turns
        (*case, (slightly_off, does_not_compile)[index % 2])
        for index, case in enumerate(CASES.values())
    ],
    ids=CASES.keys(),
)
def test_only_broken_kernels_are_found_and_mlx_runs_in_their_place(
    family, is_broken, name, break_results
):
    """The logits are then about those of a model without our kernels. It warns once."""
    target = target_on_kernels(family, broken_factory(is_broken, break_results))
    with pytest.warns(UserWarning, match="a kernel of ours is broken here and left out"):
        logits = answer(target)
    problems = target.kernel_plan.kernels.checks.failed
    assert problems and all(name in key for key in problems), problems
    message = "does not run (program_source:52:13: error: use of undeclared identifier 'fragment')"
    if break_results is slightly_off:
        message = "differs from its reference by"
    assert all(message in problem for problem in problems.values())
    stock = dm.Target(
        half_precision(family),
        tokenizer=families.CharacterTokenizer(),
        config=families.CONFIGS[family],
        name=family,
    )
    expected = answer(stock)
    if family == "qwen3":  # in models with experts, a rounding may change a router's choice
        assert mx.abs(logits - expected).max() < 0.1 * mx.abs(expected).max()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer(target)


@pytest.mark.parametrize(
    ("break_results", "messages"),
    [
        (too_many_threads, "does not run (Thread group size (512) is greater than"),
        (one_element_off, "differs from its reference by"),
        (not_a_number, "differs from its reference by nan"),
        (infinite, "differs from its reference by inf"),
        (lambda results: [results[0][:, :-1]], "does not run|gives"),
    ],
)
def test_every_way_to_fail_is_found(break_results, messages):
    """Alternative messages are separated by |."""
    is_broken = named("verify_matmul_affine", "gate_up")
    problems = failed_checks("qwen3", broken_factory(is_broken, break_results)).values()
    assert problems
    for problem in problems:
        assert any(message in problem for message in messages.split("|"))


@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_are_checked_at_their_first_use_and_not_before(bits):
    """Those for quantized keys, for trees, and for each number of rows."""
    recorder = Recorder()
    target = target_on_kernels("qwen3", recorder)
    checks = target.kernel_plan.kernels.checks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recorder gives zeros, so that all checks fail
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


def test_a_second_command_compiles_only_the_kernels_that_its_answer_launches(
    monkeypatch, tmp_path, folder
):
    """The first one stored choices and passed checks on disk, so it checks nothing."""
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    all_rows = candidates(dm.load_target(folder, bits=4, kernels="off"))
    won = {key: rows - {16} for key, rows in all_rows.items()}  # so that exact is not the default
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
        result = run(*command, "--draft", "lookup")
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1] == texts[2]
    first, second, third = runs[1:]
    assert sum(first.counts.values()) > sum(second.counts.values())
    assert second.counts == third.counts
    assert second.libraries == third.libraries <= first.libraries
    # Products of one matrix, of three, and gated; both passes of attention.
    assert len(second.libraries) <= 5
    assert not any("tree" in name for name in second.libraries)


def test_exact_decoding_is_refused_if_one_of_its_kernels_is_broken(folder, monkeypatch):
    """Where it is only the default, the model is loaded without it, with a warning."""
    broken = broken_factory(named("block_attention_merge"), slightly_off)
    load = {"bits": 4, "group_size": 32, "metal_kernel": broken}
    with pytest.raises(KernelError, match="Exact decoding needs our kernels: attention 4/2 heads"):
        dm.load_target(folder, **load, kernels="exact")
    free = candidates(dm.load_target(folder, bits=4, group_size=32, kernels="off"))
    monkeypatch.setattr(kernel_plan, "read_choices", lambda forms: free)
    with pytest.warns(UserWarning, match="Exact decoding needs our kernels"):
        assert not dm.load_target(folder, **load).kernel_plan.exact


def kernels_with_other_bits_for_several_rows():
    """Kernels whose results are right, but rounded more coarsely if several rows share a call."""

    def coarse(results):
        return [(y.view(mx.uint32) & 0xFFFFFFF0).view(mx.float32) for y in results]

    def has_several_rows(name, call):
        x = call["inputs"][0]
        return name.startswith("verify_matmul_affine_float") and x.size > x.shape[-1]

    return broken_factory(has_several_rows, coarse)


def test_an_exact_load_compares_rows_of_a_block_with_single_rows(folder, monkeypatch):
    """If they differ, exact decoding is refused, or it is not the default."""
    load = {
        "bits": 4,
        "group_size": 32,
        "metal_kernel": kernels_with_other_bits_for_several_rows(),
    }
    with pytest.raises(KernelError, match="row 1 of 16 that .* verifies has other bits here"):
        dm.load_target(folder, **load, kernels="exact")
    with monkeypatch.context() as patch:
        model = dm.load_target(folder, bits=4, group_size=32, kernels="off")
        free = candidates(model)
        patch.setattr(kernel_plan, "read_choices", lambda forms: free)
        with pytest.warns(UserWarning, match="has other bits here than alone"):
            assert not dm.load_target(folder, **load).kernel_plan.exact


def test_a_check_of_experts_routes_its_rows_to_many_of_them():
    """Though the call that it precedes sends all rows to one expert."""
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
    [experts_of_rows] = routes
    assert len({tuple(sorted(experts)) for experts in experts_of_rows}) > 8
    assert all(len(set(experts)) == 4 for experts in experts_of_rows)
