"""Whole models through our kernels: drafted text is the plain one, in chains and in trees.

Half precision, in 4 and in 8 bits, where stock kernels of a GPU round a row differently in a block.
The emulator runs unchecked here: other tests look at what it finds, this one at what comes out.
"""

from functools import cache, partial
from random import Random

import families
import mlx.core as mx
import pytest
import tinymodels
from kernel_check import on_gpu_or_emulator
from kernel_models import HEAD, Launches, chosen_target, exact_target, float_target, quick_factory
from oracle import Oracle, random_tree
from request_set import TextOracle

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.kernels.modules import SWAPS, Kernels, swap_layers
from dflash_mlx.loading import kernel_plan
from dflash_mlx.loading.kernel_plan import candidates
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

pytestmark = on_gpu_or_emulator

TOKENS = 10
BLOCK = 12
PROMPT = families.random_prompt(41, seed=1)  # longer than the sliding windows
SHORT = PROMPT[:9]
FAMILIES = ("qwen3", "qwen3_5", "qwen3_moe", "gpt_oss")
FORMATS = {"4-bit bf16": (4, mx.bfloat16), "8-bit fp16": (8, mx.float16)}
every_model = pytest.mark.parametrize(
    ("family", "format"),
    [(family, list(FORMATS)[index % 2]) for index, family in enumerate(FAMILIES)],
)


@cache
def model(family: str, format: str) -> tuple[Target, list[int]]:
    """A target on our kernels, and its plain text."""
    target = exact_target(family, quick_factory(), *FORMATS[format])
    plain = dm.generate(target, None, PROMPT, max_tokens=TOKENS).tokens
    assert len(set(plain)) > 4
    return target, plain


@every_model
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_text_is_the_plain_text(family, format, trees):
    """With drafts that are right seven times in ten: paths are accepted and rows rejected."""
    target, plain = model(family, format)
    oracle = TextOracle([[*PROMPT, *plain]], target.vocab_size, 0.7)
    oracle.branches = trees
    drafted = dm.generate(target, oracle, PROMPT, max_tokens=TOKENS, block_size=BLOCK)
    assert drafted.tokens == plain
    assert 0 < drafted.stats.accepted_tokens < drafted.stats.drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_block_are_those_of_steps_of_one(family):
    """Bit for bit, in float32 too; the block is longer than a sliding window, a ring."""
    target = exact_target(family, factory=quick_factory(), bits=4, dtype=mx.float32)
    text = families.random_prompt(40, seed=5)
    session = target.start()
    steps = []
    list(session.prefill(PROMPT))
    for token in text:
        steps.append(session.verify(Proposal([token]))[0])
        session.commit([0])
    assert mx.array_equal(mx.concatenate(steps), verified(target, Proposal(text)))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_verify_of_any_size_runs_where_a_stopwatch_decides(family):
    """Beyond a kernel's most rows MLX's own runs, for chains and for trees."""
    target = chosen_target(family, quick_factory())
    stock = float_target(family)
    for rows in (65, 96, 256, 1024):
        text = families.random_prompt(rows, seed=rows)
        for proposal in (Proposal(text), random_tree(Random(rows), rows)):
            logits, expected = (verified(model, proposal) for model in (target, stock))
            assert mx.array_equal(logits.argmax(-1), expected.argmax(-1))
            assert mx.allclose(logits, expected, atol=1e-3)


def verified(target: Target, proposal: Proposal) -> mx.array:
    """The logits [N, V] of a proposal after the prompt."""
    session = target.start()
    list(session.prefill(PROMPT))
    return session.verify(proposal)[0]


def test_windows_do_not_make_a_tree_of_a_chain():
    """The mask of a sliding layer says no more than its window; a tree's kernel reads more."""
    kinds = []

    def watch(name, call, results):
        kinds.extend(["tree" in name] * ("attention_" in name and "merge" not in name))
        return results

    session = exact_target("gpt_oss", Launches(change=watch)).start()
    list(session.prefill(PROMPT))
    kinds.clear()
    session.verify(Proposal([7] * 6))
    assert set(kinds) == {False}
    session.commit([0])
    kinds.clear()
    session.verify(Proposal([7] * 6, (-1, 0, 0, 1, 2, 4)))
    assert set(kinds) == {True}


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((exact_target, family) for family in FAMILIES), (chosen_target, "qwen3")],
)
def test_the_function_of_a_traced_step_runs_on_kernels(kind, family, monkeypatch):
    """Bit for bit. No emulator can run in a trace: the function is called each time."""
    target = kind(family, quick_factory())
    lengths = [5, 1, 16, 5, 1, 5, 1, 16] * 2
    expected = steps(target, lengths)
    assert target.steps.why_not == "the kernels are emulated"
    target.steps.why_not = None
    monkeypatch.setattr(mx, "compile", lambda function: function)
    results = steps(target, lengths)
    assert target.steps.why_not is None and target.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


def steps(target: Target, lengths: list[int]) -> list[mx.array]:
    """The logits of verifies of so many rows, behind a prompt; the first rows are kept."""
    session = target.start()
    list(session.prefill(PROMPT))
    results = []
    for number, rows in enumerate(lengths):
        results.append(session.verify(Proposal(families.random_prompt(rows, seed=number)))[0])
        session.commit(list(range(-(-rows // 2))))
    return results


def test_quantized_keys_and_values():
    target = exact_target("qwen3", quick_factory())
    plain = dm.generate(target, None, SHORT, max_tokens=12, kv_bits=8).tokens
    oracle = Oracle(SHORT, answer=plain, vocab_size=target.vocab_size, p=0.7)
    drafted = dm.generate(target, oracle, SHORT, max_tokens=12, block_size=8, kv_bits=8)
    assert drafted.tokens == plain


def test_a_kernel_whose_rows_depend_on_each_other_would_be_noticed():
    """One that gives bfloat16 with 3 bits less whenever there is more than one row."""

    def coarse(name, call, results):
        x = call["inputs"][0]
        if not name.startswith("verify_matmul") or x.size == x.shape[-1]:
            return results
        return [(y.view(mx.uint16) & 0xFFF8).view(y.dtype) for y in results]

    target = exact_target("qwen3", Launches(change=coarse))
    plain = dm.generate(target, None, SHORT, max_tokens=24).tokens
    oracle = Oracle(SHORT, answer=plain, vocab_size=target.vocab_size, p=1.0)
    with pytest.raises(AssertionError, match="the anchor is not the token"):
        dm.generate(target, oracle, SHORT, max_tokens=24, block_size=16)


def test_many_rows_are_left_to_stock_layers():
    launches = Launches()
    target = exact_target("qwen3", launches)
    launches.counts.clear()  # of the forward that shows where the parts are
    session = target.start()
    next(session.prefill(families.random_prompt(130, seed=1)))  # 66 tokens; the last 64 are ours
    assert session.position == 66
    assert launches.counts == {"verify_matmul_affine": 1}  # the head, of one row
    session.verify(Proposal([1]))
    session.commit([0])
    assert launches.counts
    with pytest.raises(SettingsError, match="at most 64 rows"):
        session.verify(Proposal([1] * 65))


def test_exact_by_default_only_where_every_layer_can_be(monkeypatch, tmp_path):
    """On a machine where every product was measured to be free, with heads of the right size."""
    for head_dim, exact in ((HEAD, True), (HEAD // 2, False)):
        folder = tinymodels.save_target(tmp_path / str(head_dim), head_dim=head_dim)
        load = partial(
            dm.load_target, str(folder), bits=8, group_size=32, metal_kernel=quick_factory()
        )
        unmeasured = load()
        assert not unmeasured.kernel_plan.exact
        plain = load(kernels="off")
        free = candidates(plain)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_plan, "read_choices", lambda forms, free=free: free)
            target = load()
        assert target.kernel_plan.exact == exact
        target.start().verify(Proposal([7, 9]))


def test_without_metal_nothing_changes(tmp_path):
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    folder = str(tinymodels.save_target(tmp_path, "qwen3_moe"))
    target = dm.load_target(folder, bits=4)
    assert target.kernel_plan is None
    assert not {type(module) for module in target.model.modules()} & set(SWAPS.values())
    with pytest.raises(SettingsError, match="needs Metal"):
        dm.load_target(folder, kernels="exact")


def test_what_cannot_be_exact_is_refused():
    kernels = Kernels(quick_factory())

    def refusal(model, family):
        with pytest.raises(SettingsError, match="leave it out") as caught:
            config = families.CONFIGS[family]
            plan = swap_layers(model, config=config, kernels=kernels, rows={}, exact=True)
            Target(
                model,
                tokenizer=families.CharacterTokenizer(),
                config=config,
                name=family,
                kernel_plan=plan,
            )
        return str(caught.value)

    model = families.random_model("qwen3", head_dim=HEAD)
    Quantization(4, 32, "mxfp4").apply(model)
    assert "mxfp4" in refusal(model, "qwen3")
    kimi = families.random_model("kimi_k25")
    assert "MoEGate" in refusal(kimi, "kimi_k25")
    assert not {type(module) for module in kimi.modules()} & set(SWAPS.values())
    assert "Attention" in refusal(families.random_model("qwen3"), "qwen3")  # heads of 32
    sharing = families.random_model("gemma4_E4B-like", head_dim=HEAD)
    assert "Attention" in refusal(sharing, "gemma4_E4B-like")


@pytest.mark.parametrize("loader", [dm.load, dm.load_target, dm.load_drafter])
@pytest.mark.parametrize("kernels", [5, "yes", True])
def test_what_runs_no_kernels_is_refused(loader, kernels):
    with pytest.raises(SettingsError, match='kernels must be "auto", "off"'):
        loader("tiny", kernels=kernels)
