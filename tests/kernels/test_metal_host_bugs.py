"""The bugs that Metal kernels have, planted one at a time: the emulator names each of them."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import metal_host
import mlx.core as mx
import pytest
from metal_host import CheckError, EmulatedKernel, compiler, samples

pytestmark = metal_host.needs_compiler

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BEFORE_PRODUCT = f"{BARRIER}\n    for (int k = 0"
AFTER_PRODUCT = f"}}\n    {BARRIER}\n  }}"
LAST_PRODUCT = "simdgroup_multiply_accumulate(high, x_high, w_columns, high);"

# What becomes of the kernel's text, and the kind of finding.
BUGS = {
    "no barrier before the product": (BEFORE_PRODUCT, "for (int k = 0", "race"),
    "no barrier after the product": (AFTER_PRODUCT, "}\n  }", "race"),
    "a barrier that orders nothing": (
        BEFORE_PRODUCT,
        BEFORE_PRODUCT.replace("mem_threadgroup", "mem_none"),
        "race",
    ),
    "reads a row past the scales": (
        "column * (K / 64) + start / 64",
        "(column + 1) * (K / 64) + start / 64",
        "out-of-bounds",
    ),
    "a tile one row short": (
        "w_tile[columns * stride]",
        "w_tile[(columns - 1) * stride]",
        "out-of-bounds",
    ),
    "half of a tile never written": (
        "unpack<T>(words[1], scale, bias, w_tile + w_row * stride + w_at + 8);",
        "",
        "uninitialised",
    ),
    "threadgroups write the same output": ("N + first + i % columns", "N + i % columns", "race"),
    "a barrier for some threads": (
        BEFORE_PRODUCT,
        f"if (s < 3) {BEFORE_PRODUCT}",
        "barrier-divergence",
    ),
    "40 KB of threadgroup memory": (
        "float sums[16 * columns]",
        "float sums[256 * columns]",
        "threadgroup-memory",
    ),
    "writes to an input": (
        "= T(sums[i]);",
        "= T(sums[i]), ((device T*)x)[i] = T(0);",
        "write-to-input",
    ),
    "a matrix product by half of the lanes": (
        LAST_PRODUCT,
        f"if (thread_index_in_simdgroup < 16) {LAST_PRODUCT}",
        "divergent-matrix",
    ),
    # Beyond the fourteen:
    "a SIMD-group barrier for some lanes": (
        LAST_PRODUCT,
        f"{LAST_PRODUCT} if (t % 32 < 16) simdgroup_barrier(mem_flags::mem_threadgroup);",
        "barrier-divergence",
    ),
    "a shuffle from a lane that is not there": (
        "float sums[16 * columns];",
        "float sums[16 * columns];\n  if (thread_index_in_simdgroup < 16) simd_shuffle(0.0f, 20);",
        "inactive-lane",
    ),
    "reads across the alignment": (
        "words[0]",
        "*(const device uint*)((const device char*)words + 2)",
        "misaligned",
    ),
    "a shift by more than the bits": ("(4 * i)", "(4 * i + 8)", "shift"),
    "an index past a thread's own array": (
        "const uint x_row = t / 8,",
        "uint own[4] = {}; own[s + 2]++; const uint x_row = own[s + 2] - 1 + t / 8,",
        "array-index",
    ),
    "an index past the last array of a struct": (
        "const uint x_row = t / 8,",
        "struct { uint one, own[4]; } last = {}; last.own[s + 2]++; "
        "const uint x_row = last.own[s + 2] - 1 + t / 8,",
        "array-index",
    ),
    "a division by zero": ("column * (K / 8)", "column * (K / (8 * int(s)))", "division"),
    "a wild pointer": ("= x[x_row", "= (x + (1l << 40))[x_row", "out-of-bounds"),
}


def sample() -> samples.Sample:
    x = mx.random.normal((16, 256), key=mx.random.key(0)).astype(mx.float16)
    weights = mx.random.normal((64, 256), key=mx.random.key(1)).astype(mx.float16)
    return samples.matmul(x, weights)


def planted(correct: str, wrong: str) -> samples.Sample:
    """The matmul with one piece of its text replaced."""
    whole = sample()
    texts = {key: whole.constructor[key] for key in ("header", "source")}
    assert sum(text.count(correct) for text in texts.values()) == 1, correct
    changed = {key: text.replace(correct, wrong) for key, text in texts.items()}
    return replace(whole, constructor=whole.constructor | changed)


def kinds(caught: pytest.ExceptionInfo[CheckError]) -> set[str]:
    return {finding.kind for finding in caught.value.findings}


@pytest.mark.parametrize("checked", [True, False])
def test_nothing_is_found_in_the_kernel_itself(checked):
    whole = sample()
    x, words, scales, biases = whole.inputs
    weights = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 64, 4)
    assert mx.allclose(whole.run(checked=checked)[0], x.astype(mx.float32) @ weights.T, atol=0.05)


@pytest.mark.parametrize("correct,wrong,kind", BUGS.values(), ids=BUGS.keys())
def test_bug_is_found(correct, wrong, kind):
    with pytest.raises(CheckError) as caught:
        planted(correct, wrong).run()
    assert kind in kinds(caught), caught.value


@pytest.mark.parametrize("compiler", metal_host.compilers(), ids=lambda each: each.version[:12])
def test_a_variable_never_set_is_not_zero(compiler):
    """A thread's own memory is not checked, but what is wrong there shows in the result."""
    (right,) = sample().run(compiler=compiler)
    (wrong,) = planted("> low(0), high(0);", "> low, high(0);").run(compiler=compiler)
    assert mx.array_equal(wrong[8:], right[8:])
    assert not mx.isfinite(wrong[:8]).any().item()


def test_finding_names_the_line():
    correct, wrong, _ = BUGS["writes to an input"]
    bug = planted(correct, wrong)
    with pytest.raises(CheckError) as caught:
        bug.run()
    (finding,) = caught.value.findings
    lines = bug.constructor["source"].splitlines()
    source, line = finding.where.split(":")
    assert source == "body" and wrong in lines[int(line) - 1]


@pytest.mark.parametrize("threads", [1, 64])
def test_too_much_private_memory_is_found(threads):
    """And the next launch finds every thread's stack in order again."""
    body = """
      const uint t = thread_position_in_grid.x;
      float own[SIZE];
      for (uint i = 0; i < SIZE; i++) own[(i * 7 + t) % SIZE] = i;
      threadgroup_barrier(mem_flags::mem_none);
      out[t] = own[t];
    """

    def kernel(size, **call):
        source = f"constexpr int SIZE = {size};\n{body}"
        return EmulatedKernel("private", [], ["out"], source)(**call)

    call = dict(output_shapes=[(threads,)], output_dtypes=[mx.float32], inputs=[])
    call |= dict(grid=(threads, 1, 1), threadgroup=(threads, 1, 1))
    with pytest.raises(CheckError) as caught:
        kernel(10_000, **call)
    assert kinds(caught) & {"stack-overflow", "thread-memory", "out-of-bounds"}, caught.value
    (result,) = kernel(100, **call)
    assert result[0].item() == 0


RUN_A_COPY = """
import sys
from pathlib import Path
from metal_host import compiler
compiler.CACHE = Path(sys.argv[1])
sys.path.append(sys.argv[2])
import test_metal_host_bugs
test_metal_host_bugs.sample().run(checked=False)
"""


def test_a_copied_cache_has_a_runtime_of_its_own(tmp_path):
    """Its kernels once loaded the original's beside it, and the process died."""
    sample().run(checked=False)
    for library in compiler.CACHE.glob("*.so"):
        shutil.copy(library, tmp_path)
    command = [sys.executable, "-c", RUN_A_COPY, str(tmp_path), str(Path(__file__).parent)]
    subprocess.run(command, cwd=Path(__file__).parents[1] / "helpers", check=True)
