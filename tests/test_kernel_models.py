"""Whole models through our kernels: drafted text is the plain one, in chains and in trees.

Half precision, in 4 and in 8 bits, where stock kernels of a GPU round a row differently in a block.
The emulator runs unchecked here: other tests look at what it finds, this one at what comes out.
"""

from functools import cache, partial

import families
import mlx.core as mx
import pytest
from kernel_check import kernel_factory, on_gpu_or_emulator
from kernel_models import Launches, exact_target
from kernel_trees import random_parents
from metal_host import EmulatedKernel
from oracle import Oracle
from trees import TreeOracle

import dflash_mlx as dm
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

pytestmark = on_gpu_or_emulator

TOKENS, BLOCK = 10, 12
PROMPT = families.random_prompt(41, seed=1)  # longer than the sliding windows
FAMILIES = ("qwen3", "qwen3_5", "qwen3_moe", "gpt_oss")
FORMATS = {"4-bit bf16": (4, mx.bfloat16), "8-bit fp16": (8, mx.float16)}
every_model = pytest.mark.parametrize(
    ("family", "format"), [(family, name) for family in FAMILIES for name in FORMATS]
)


@cache
def model(family: str, format: str) -> tuple[Target, Launches, list[int]]:
    """A target on our kernels, what counts their launches, and its plain text."""
    factory = kernel_factory()
    if factory is EmulatedKernel:
        factory = partial(EmulatedKernel, checked=False)
    launches = Launches(factory)
    target = exact_target(family, launches, *FORMATS[format])
    plain = dm.generate(target, None, PROMPT, max_tokens=TOKENS).tokens
    assert len(set(plain)) > 4
    return target, launches, plain


@every_model
@pytest.mark.parametrize("drafts", [Oracle, TreeOracle])
def test_drafted_text_is_the_plain_text(family, format, drafts):
    """With drafts that are right seven times in ten: paths are accepted and rows rejected."""
    target, _, plain = model(family, format)
    oracle = drafts(PROMPT, plain, target.vocab_size, 0.7, seed=2)
    drafted = dm.generate(target, oracle, PROMPT, max_tokens=TOKENS, block_size=BLOCK)
    assert drafted.tokens == plain
    assert 0 < drafted.stats.accepted_tokens < drafted.stats.drafted_tokens


# One verify of a model of four layers in which all products are ours, and the commit of one row.
_DENSE = {"verify_matmul_affine": 9, "verify_matmul_affine_gate_up": 4}  # o, down and the head
_ATTENTION = {"verify_qkv_3_affine": 1, "block_attention": 1, "block_attention_merge": 1}
_FOUR = {name: 4 for name in _ATTENTION}
_RECURRENCE = {"verify_qkv_4_affine": 3, "delta_verify_chain": 3, "delta_replay": 3}
LAUNCHES = {
    "qwen3": _FOUR | _DENSE,
    "qwen3_5": _ATTENTION | _RECURRENCE | _DENSE,
    # Of each layer o and the router; of its experts gate and up together, and down.
    "qwen3_moe": _FOUR
    | {"verify_matmul_affine": 9, "verify_matmul_moe_affine_gate_up": 4}
    | {"verify_matmul_moe_affine": 4},
    "gpt_oss": _FOUR | {"verify_matmul_affine": 9, "verify_matmul_moe_affine": 12},
}


@every_model
@pytest.mark.parametrize("tree", [False, True])
def test_launches_of_a_round(family, format, tree):
    """The same for every number of rows; docs/kernels.md has the table."""
    target, launches, _ = model(family, format)
    session = target.start()
    list(session.prefill(PROMPT))
    expected = LAUNCHES[family]
    if tree and "delta_verify_chain" in expected:
        expected = dict(expected)
        expected["delta_verify_tree"] = expected.pop("delta_verify_chain")
    for rows in (16, 5):
        launches.counts.clear()
        tokens = families.random_prompt(rows, seed=3)
        proposal = Proposal(tokens, tuple(random_parents(rows))) if tree else Proposal(tokens)
        mx.eval(session.verify(proposal)[0])
        session.commit([0])
        assert launches.counts == expected
