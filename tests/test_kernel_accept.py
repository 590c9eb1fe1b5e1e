"""The accept walk on the emulated device, against the one in Python."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import DTYPES, Counted, kernel_factory, on_gpu_or_emulator
from kernel_trees import random_parents
from metal_host import EmulatedKernel, needs_compiler, needs_strict_compiler

from dflash_mlx.accept import accept
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.accept import AcceptWalk, accept_walk_reference, read_walk

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def kernel() -> AcceptWalk:
    return AcceptWalk(kernel_factory())


def draft(nodes: int, vocabulary: int, seed: int, tree: bool) -> tuple[mx.array, list, list]:
    """Logits [N, V] with many equal ones, and a draft that follows them for a while."""
    random = np.random.default_rng(seed)
    logits = random.integers(-3, 4, size=(nodes, vocabulary)).astype(np.float32)
    choices = logits.argmax(axis=1)
    parents = random_parents(nodes, seed) if tree else list(range(-1, nodes - 1))
    tokens = [0]
    for parent in parents[1:]:
        right = random.random() < 0.8
        tokens.append(int(choices[parent]) if right else int(random.integers(vocabulary)))
    return mx.array(logits), tokens, parents


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("nodes", "vocabulary", "tree"),
    [(1, 5, False), (3, 8192, False), (16, 8193, False), (12, 20011, True), (64, 300, True)],
)
def test_the_device_walks_as_python_does(nodes, vocabulary, tree, dtype, kernel):
    for seed in range(3):
        logits, tokens, parents = draft(nodes, vocabulary, seed, tree)
        expected = accept(tokens, parents, mx.argmax(logits, axis=-1).tolist())
        for walk in (kernel, accept_walk_reference):
            result = walk(logits.astype(dtype), mx.array(tokens), mx.array(parents))
            assert read_walk(result) == expected
            assert result[2 + len(expected[0]) :].tolist() == [-1] * (nodes - len(expected[0]))


def test_of_equal_siblings_the_first_is_followed(kernel):
    logits = mx.zeros((4, 10)).at[:, 7].add(1.0)
    tokens, parents = mx.array([1, 7, 7, 7]), mx.array([-1, 0, 0, 1])
    for walk in (kernel, accept_walk_reference):
        assert read_walk(walk(logits, tokens, parents)) == ([0, 1, 3], 7)


@pytest.mark.parametrize("where", [0, 31, 255, 256, 8191, 8192, 9999])
def test_the_first_of_equal_logits_wins(where, kernel):
    """Wherever it lies: the first and last of a lane, a SIMD-group, a piece, the vocabulary."""
    logits = mx.full((1, 10000), -mx.inf)
    logits[0, where] = 2.5
    logits[0, 9999] = 2.5
    assert read_walk(kernel(logits, mx.array([0]), mx.array([-1]))) == ([0], where)


def test_a_row_of_minus_infinity_chooses_the_first_token(kernel):
    logits = mx.full((2, 9), -mx.inf)
    tokens, parents = mx.array([4, 0]), mx.array([-1, 0])
    for walk in (kernel, accept_walk_reference):
        assert read_walk(walk(logits, tokens, parents)) == ([0, 1], 0)


@needs_compiler
def test_logits_are_read_once():
    """Counted, where the vocabulary is not a multiple of a piece or a SIMD-group."""
    counted, logits = Counted(), mx.zeros((5, 8500), mx.bfloat16)
    AcceptWalk(counted)(logits, mx.zeros(5), mx.arange(-1, 4))
    assert counted.counters("accept_best").buffers["logits"].read == logits.nbytes


@needs_compiler
@needs_strict_compiler
def test_address_spaces():
    """Of the smallest inputs too, which MLX hands over in constant memory."""
    walk = AcceptWalk(partial(EmulatedKernel, strict=True))
    assert read_walk(walk(mx.zeros((1, 2)), mx.array([0]), mx.array([-1]))) == ([0], 0)


def test_what_does_not_fit_is_refused(kernel):
    logits, rows = mx.zeros((3, 8)), mx.array([-1, 0, 1])
    for args, words in [
        ((logits[0], rows, rows), r"logits are \(8,\)"),
        ((logits.astype(mx.int32), rows, rows), "logits are int32"),
        ((logits, rows, rows[:2]), "3 rows need as many tokens and parents"),
    ]:
        for walk in (kernel, accept_walk_reference):
            with pytest.raises(KernelError, match=words):
                walk(*args)
