"""The mutants that scripts/mutate_kernels.py plants: of code alone, one line each, all kinds."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def mutants_of():
    spec = importlib.util.spec_from_file_location("mutants", SCRIPTS / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    yield module.mutants_of
    del sys.modules[spec.name]


METAL = """\
// a comment: i < 3
#include "fragment.h"
template <int N>
  threadgroup_barrier(mem_flags::mem_threadgroup);
  DFLASH_UNROLL
  for (int i = 0; i < N; i++) sum = fma(a[i], b, sum);  // 4 + 4
  float load(int row) const thread {
    if (row > 0 && row <= 5) return data[size_t(row) * row_stride];
"""
PYTHON = '''\
"""Doc: 1 < 2."""
from a import b
_BODY = """
    dflash::call(x, y, x_shape[0]);
"""
def f(rows):
    if rows is None or rows > 64:
        raise ValueError(f"{rows} > 64 + 1")
    return g(grid=(rows * 32, 1))  # 5 * 5
'''


def changes(mutants_of, file, text):
    """Line and what it becomes, of every mutant."""
    found = mutants_of(file, text)
    lines = text.splitlines()
    assert all(lines[mutant.number - 1] == mutant.line != mutant.becomes for mutant in found)
    return [(mutant.number, mutant.kind, mutant.becomes.strip()) for mutant in found]


def test_mutants_of_metal(mutants_of):
    found = changes(mutants_of, "a.metal", METAL)
    assert {number for number, _, _ in found} == {4, 5, 6, 7, 8}
    for expected in (
        (4, "barrier", ""),
        (4, "barrier", "threadgroup_barrier(mem_flags::mem_none);"),
        (5, "unroll", ""),
        (6, "bound", "for (int i = 0; i <= N; i++) sum = fma(a[i], b, sum);  // 4 + 4"),
        (6, "constant", "for (int i = 1; i < N; i++) sum = fma(a[i], b, sum);  // 4 + 4"),
        (6, "function", "for (int i = 0; i < N; i++) sum = (a[i] * b + sum);  // 4 + 4"),
        (7, "space", "float load(int row) const {"),
        (8, "condition", "if (row > 0 || row <= 5) return data[size_t(row) * row_stride];"),
        (8, "dtype", "if (row > 0 && row <= 5) return data[int(row) * row_stride];"),
        (8, "stride", "if (row > 0 && row <= 5) return data[size_t(row) * (row_stride + 1)];"),
    ):
        assert expected in found
    assert len(found) == len(set(found))


def test_mutants_of_python_and_the_metal_in_it(mutants_of):
    found = changes(mutants_of, "a.py", PYTHON)
    assert {number for number, _, _ in found} == {4, 7, 9}
    for expected in (
        (4, "argument", "dflash::call(y, x, x_shape[0]);"),
        (4, "constant", "dflash::call(x, y, x_shape[1]);"),
        (7, "condition", "if rows is not None or rows > 64:"),
        (7, "bound", "if rows is None or rows >= 64:"),
        (9, "operator", "return g(grid=(rows / 32, 1))  # 5 * 5"),
    ):
        assert expected in found
