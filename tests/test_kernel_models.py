"""Whole models through our kernels: drafted text is the plain one, in chains and in trees.

Half precision, in 4 and in 8 bits, where stock kernels of a GPU round a row differently in a block.
The emulator runs unchecked here: other tests look at what it finds, this one at what comes out.
"""

from functools import cache, partial

import families
import mlx.core as mx
import pytest
from kernel_check import kernel_factory, on_gpu_or_emulator
from kernel_models import exact_target
from metal_host import EmulatedKernel
from oracle import Oracle
from trees import TreeOracle

import dflash_mlx as dm
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
    factory = kernel_factory()
    if factory is EmulatedKernel:
        factory = partial(EmulatedKernel, checked=False)
    target = exact_target(family, factory, *FORMATS[format])
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
