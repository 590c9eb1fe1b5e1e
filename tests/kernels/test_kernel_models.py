"""Whole models on our kernels: drafted text is the plain text, with chains and with trees.

In half precision with 4 or 8 bits, where a GPU's stock kernels round a row differently in a block.
The emulator does not check memory accesses here; other tests do.
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
    # The formats take turns.
    [(family, list(FORMATS)[index % 2]) for index, family in enumerate(FAMILIES)],
)


@cache
def target_and_text(family: str, format: str) -> tuple[Target, list[int]]:
    """A target on our kernels, and its plain text after PROMPT."""
    target = exact_target(family, quick_factory(), *FORMATS[format])
    plain = dm.generate(target, None, PROMPT, max_tokens=TOKENS).tokens
    assert len(set(plain)) > 4
    return target, plain


@every_model
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_text_is_the_plain_text(family, format, trees):
    """Seven drafts in ten are right, so some are accepted and some are rejected."""
    target, plain = target_and_text(family, format)
    oracle = TextOracle([[*PROMPT, *plain]], target.vocab_size, 0.7)
    oracle.branches = trees
    drafted = dm.generate(target, oracle, PROMPT, max_tokens=TOKENS, block_size=BLOCK)
    assert drafted.tokens == plain
    assert 0 < drafted.stats.accepted_tokens < drafted.stats.drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_block_have_the_bits_of_single_rows(family):
    """In float32 as well. The block is longer than a sliding window."""
    target = exact_target(family, factory=quick_factory(), bits=4, dtype=mx.float32)
    text = families.random_prompt(40, seed=5)
    session = target.start()
    steps = []
    list(session.prefill(PROMPT))
    for token in text:
        steps.append(session.verify(Proposal([token]))[0])
        session.commit([0])
    assert mx.array_equal(mx.concatenate(steps), logits_of(target, Proposal(text)))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_verify_of_more_rows_than_kernels_take_runs_on_mlx(family):
    """For chains and for trees, on a target whose kernels were chosen by timing."""
    target = chosen_target(family, quick_factory())
    stock = float_target(family)
    for rows in (65, 96, 256, 1024):
        text = families.random_prompt(rows, seed=rows)
        for proposal in (Proposal(text), random_tree(Random(rows), rows)):
            logits = logits_of(target, proposal)
            expected = logits_of(stock, proposal)
            assert mx.array_equal(logits.argmax(-1), expected.argmax(-1))
            assert mx.allclose(logits, expected, atol=1e-3)


def logits_of(target: Target, proposal: Proposal) -> mx.array:
    """The logits [N, V] of a proposal after the prompt."""
    session = target.start()
    list(session.prefill(PROMPT))
    return session.verify(proposal)[0]


def test_a_chain_in_a_sliding_window_does_not_use_the_kernel_for_trees():
    """A window needs a mask for a chain as well, but the kernel for trees reads more memory."""
    used_tree_kernel = []

    def watch(name, call, results):
        if "attention_" in name and "merge" not in name:
            used_tree_kernel.append("tree" in name)
        return results

    session = exact_target("gpt_oss", Launches(change=watch)).start()
    list(session.prefill(PROMPT))
    used_tree_kernel.clear()
    session.verify(Proposal([7] * 6))
    assert set(used_tree_kernel) == {False}
    session.commit([0])
    used_tree_kernel.clear()
    session.verify(Proposal([7] * 6, (-1, 0, 0, 1, 2, 4)))
    assert set(used_tree_kernel) == {True}


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((exact_target, family) for family in FAMILIES), (chosen_target, "qwen3")],
)
def test_a_traced_step_has_the_bits_of_an_untraced_one(kind, family, monkeypatch):
    """Emulated kernels cannot run in a trace, so `mx.compile` returns the function unchanged."""
    target = kind(family, quick_factory())
    lengths = [5, 1, 16, 5, 1, 5, 1, 16] * 2
    expected = logits_of_steps(target, lengths)
    assert target.steps.why_not == "the kernels are emulated"
    target.steps.why_not = None
    monkeypatch.setattr(mx, "compile", lambda function: function)
    results = logits_of_steps(target, lengths)
    assert target.steps.why_not is None and target.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


def logits_of_steps(target: Target, lengths: list[int]) -> list[mx.array]:
    """The logits of steps with `lengths` rows after PROMPT; half of a step's rows are committed."""
    session = target.start()
    list(session.prefill(PROMPT))
    results = []
    for number, rows in enumerate(lengths):
        results.append(session.verify(Proposal(families.random_prompt(rows, seed=number)))[0])
        session.commit(list(range((rows + 1) // 2)))
    return results


def test_drafted_text_is_the_plain_text_with_quantized_keys():
    target = exact_target("qwen3", quick_factory())
    plain = dm.generate(target, None, SHORT, max_tokens=12, kv_bits=8).tokens
    oracle = Oracle(SHORT, answer=plain, vocab_size=target.vocab_size, p=0.7)
    drafted = dm.generate(target, oracle, SHORT, max_tokens=12, block_size=8, kv_bits=8)
    assert drafted.tokens == plain


def test_a_kernel_whose_rows_depend_on_each_other_would_be_noticed():
    """A control of these tests: products of several rows lose the last 3 bits of a bfloat16."""

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


def test_a_prefill_uses_stock_layers_for_more_than_64_rows():
    """A verify of more than 64 rows is refused in exact decoding."""
    launches = Launches()
    target = exact_target("qwen3", launches)
    launches.counts.clear()  # those of the forward that finds the model's parts
    session = target.start()
    next(session.prefill(families.random_prompt(130, seed=1)))  # the first chunk, of 66 tokens
    assert session.position == 66
    assert launches.counts == {"verify_matmul_affine": 1}  # the head, of one row
    session.verify(Proposal([1]))
    session.commit([0])
    assert launches.counts
    with pytest.raises(SettingsError, match="at most 64 rows"):
        session.verify(Proposal([1] * 65))


def test_exact_is_the_default_only_where_every_layer_has_a_kernel(monkeypatch, tmp_path):
    """Where every product was measured to cost nothing; attention needs heads of a fitting size."""
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


def test_exact_decoding_is_refused_for_models_with_layers_that_have_no_kernel():
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
def test_an_unknown_value_of_kernels_is_refused(loader, kernels):
    with pytest.raises(SettingsError, match='kernels must be "auto", "off"'):
        loader("tiny", kernels=kernels)
