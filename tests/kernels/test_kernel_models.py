"""Whole models through our kernels: drafted text is the plain one, in chains and in trees.

Half precision, in 4 and in 8 bits, where stock kernels of a GPU round a row differently in a block.
The emulator runs unchecked here: other tests look at what it finds, this one at what comes out.
"""

from functools import cache
from random import Random

import families
import mlx.core as mx
import pytest
from kernel_check import on_gpu_or_emulator
from kernel_models import Launches, chosen_target, exact_target, float_target, quick_factory
from oracle import Oracle, TreeOracle, random_tree

import dflash_mlx as dm
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

pytestmark = on_gpu_or_emulator

TOKENS, BLOCK = 10, 12
PROMPT = families.random_prompt(41, seed=1)  # longer than the sliding windows
FAMILIES = ("qwen3", "qwen3_5", "qwen3_moe", "gpt_oss")
FORMATS = {"4-bit bf16": (4, mx.bfloat16), "8-bit fp16": (8, mx.float16)}
every_model = pytest.mark.parametrize(
    ("family", "format"),
    [(family, list(FORMATS)[at % 2]) for at, family in enumerate(FAMILIES)],
)


@cache
def model(family: str, format: str) -> tuple[Target, list[int]]:
    """A target on our kernels, and its plain text."""
    target = exact_target(family, quick_factory(), *FORMATS[format])
    plain = dm.generate(target, None, PROMPT, max_tokens=TOKENS).tokens
    assert len(set(plain)) > 4
    return target, plain


@every_model
@pytest.mark.parametrize("drafts", [Oracle, TreeOracle])
def test_drafted_text_is_the_plain_text(family, format, drafts):
    """With drafts that are right seven times in ten: paths are accepted and rows rejected."""
    target, plain = model(family, format)
    oracle = drafts(PROMPT, plain, target.vocab_size, 0.7, seed=2)
    drafted = dm.generate(target, oracle, PROMPT, max_tokens=TOKENS, block_size=BLOCK)
    assert drafted.tokens == plain
    assert 0 < drafted.stats.accepted_tokens < drafted.stats.drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_block_are_those_of_steps_of_one(family):
    """Bit for bit, in float32 too: a row leaves a sliding window as a ring, a block does not.

    The block is longer than a window.
    """
    target = exact_target(family, quick_factory(), 4, mx.float32)
    text, session, steps = families.random_prompt(40, seed=5), target.start(), []
    list(session.prefill(PROMPT))
    for token in text:
        steps.append(session.verify(Proposal([token]))[0])
        session.commit([0])
    assert mx.array_equal(mx.concatenate(steps), verified(target, Proposal(text)))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_verify_of_any_size_runs_where_a_stopwatch_decides(family):
    """Beyond a kernel's most rows MLX's own runs, for chains and for trees."""
    target, stock = chosen_target(family, quick_factory()), float_target(family)
    for rows in (65, 96, 256, 1024):
        text = families.random_prompt(rows, seed=rows)
        for proposal in (Proposal(text), random_tree(Random(rows), rows)):
            logits, expected = (verified(of, proposal) for of in (target, stock))
            assert mx.array_equal(logits.argmax(-1), expected.argmax(-1))
            assert mx.allclose(logits, expected, atol=1e-3)


def verified(target: Target, proposal: Proposal) -> mx.array:
    """The logits [N, V] of a proposal behind the prompt."""
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
