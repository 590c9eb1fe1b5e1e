"""The emulator of Metal: it finds each kind of bug that a kernel can have, and rounds as Metal."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import metal_host
import mlx.core as mx
import numpy as np
import pytest
from metal_host import CheckError, EmulatedKernel, compiler, samples

pytestmark = metal_host.needs_compiler

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BEFORE_PRODUCT = f"{BARRIER}\n    for (int k = 0"
AFTER_PRODUCT = f"}}\n    {BARRIER}\n  }}"
LAST_PRODUCT = "simdgroup_multiply_accumulate(high, x_high, w_columns, high);"

# Bugs: a piece of the kernel's text, what replaces it, and the kind of the emulator's finding.
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
    """A correct kernel: a product of 16 rows by 4-bit weights."""
    x = mx.random.normal((16, 256), key=mx.random.key(0)).astype(mx.float16)
    weights = mx.random.normal((64, 256), key=mx.random.key(1)).astype(mx.float16)
    return samples.matmul(x, weights)


def planted(correct: str, wrong: str) -> samples.Sample:
    """The sample with one piece of its text replaced."""
    original = sample()
    texts = {key: original.constructor[key] for key in ("header", "source")}
    assert sum(text.count(correct) for text in texts.values()) == 1, correct
    changed_texts = {key: text.replace(correct, wrong) for key, text in texts.items()}
    return replace(original, constructor=original.constructor | changed_texts)


def kinds(caught: pytest.ExceptionInfo[CheckError]) -> set[str]:
    """The kinds of the findings that an error reports."""
    return {finding.kind for finding in caught.value.findings}


@pytest.mark.parametrize("checked", [True, False])
def test_a_correct_kernel_has_no_findings_and_the_right_result(checked):
    correct = sample()
    x, words, scales, biases = correct.inputs
    weights = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 64, 4)
    [y] = correct.run(checked=checked)
    assert mx.allclose(y, x.astype(mx.float32) @ weights.T, atol=0.05)


@pytest.mark.parametrize("correct,wrong,kind", BUGS.values(), ids=BUGS.keys())
def test_a_bug_is_found(correct, wrong, kind):
    with pytest.raises(CheckError) as caught:
        planted(correct, wrong).run()
    assert kind in kinds(caught), caught.value


def test_a_variable_that_is_never_set_is_nan():
    """A thread's private memory is not checked, but such a bug shows in the result."""
    [expected] = sample().run()
    [result] = planted("> low(0), high(0);", "> low, high(0);").run()
    assert mx.array_equal(result[8:], expected[8:])
    assert not mx.isfinite(result[:8]).any().item()


def test_a_finding_names_the_line():
    correct, wrong, _ = BUGS["writes to an input"]
    bug = planted(correct, wrong)
    with pytest.raises(CheckError) as caught:
        bug.run()
    (finding,) = caught.value.findings
    lines = bug.constructor["source"].splitlines()
    source, line = finding.where.split(":")
    assert source == "body" and wrong in lines[int(line) - 1]


def run(body: str, *inputs: mx.array, threads: int = 64, dtype: mx.Dtype = mx.float32):
    """Run the body of a kernel and return its output `out` [threads].

    The inputs are called a, b and c in the body, and `t` is the number of the thread.
    """
    source = f"const uint t = thread_position_in_grid.x;\n{body}"
    kernel = EmulatedKernel(
        "body", input_names=list("abc"[: len(inputs)]), output_names=["out"], source=source
    )
    [out] = kernel(
        inputs=inputs,
        output_shapes=[(threads,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )
    return out


@pytest.mark.parametrize("threads", [1, 64])
def test_too_much_private_memory_is_found(threads):
    """And the next launch works: the overflow left no thread's stack damaged."""
    body = """
      float own[SIZE];
      for (uint i = 0; i < SIZE; i++) own[(i * 7 + t) % SIZE] = i;
      threadgroup_barrier(mem_flags::mem_none);
      out[t] = own[t];
    """
    with pytest.raises(CheckError) as caught:
        run(body.replace("SIZE", "10000"), threads=threads)
    assert kinds(caught) & {"stack-overflow", "thread-memory", "out-of-bounds"}, caught.value
    assert run(body.replace("SIZE", "100"), threads=threads)[0].item() == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_and_bfloat_round_after_every_operation(dtype):
    """As on Metal: a * b + c is half(half(a * b) + c), not rounded once at the end."""
    a, b, c = (mx.random.normal((64,), key=mx.random.key(i)).astype(dtype) for i in range(3))
    product = (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype)
    expected = (product.astype(mx.float32) + c.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(run("out[t] = a[t] * b[t] + c[t];", a, b, c, dtype=dtype), expected)


def test_bfloat_rounds_to_even_and_keeps_infinities():
    # Two ties, a number that rounds to infinity, infinity, a subnormal, and an ordinary number.
    values = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, 1e-40, 0.1]
    inputs = mx.array(np.resize(np.array(values, np.float32), 64))
    rounded = run("out[t] = bfloat(a[t]);", inputs, dtype=mx.bfloat16)
    assert mx.array_equal(rounded, inputs.astype(mx.bfloat16))


def test_a_simdgroup_barrier_orders_only_the_lanes_of_one_simdgroup():
    """Reading another lane's value (t ^ 1) is safe; another SIMD-group's (t ^ 32) is a race."""
    body = """
      threadgroup float shared[64];
      shared[t] = a[t];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      out[t] = shared[t ^ {}];
    """
    a = mx.arange(64, dtype=mx.float32)
    assert run(body.format(1), a).tolist() == [t ^ 1 for t in range(64)]
    with pytest.raises(CheckError, match="race"):
        run(body.format(32), a)


RUN_A_COPY = """
import sys
from pathlib import Path
from metal_host import compiler
compiler.CACHE = Path(sys.argv[1])
sys.path.append(sys.argv[2])
import test_metal_host
test_metal_host.sample().run(checked=False)
"""


def test_a_copied_cache_of_compiled_kernels_works(tmp_path):
    """Kernels of a copy once loaded the original's runtime library as well, and crashed."""
    sample().run(checked=False)
    for library in compiler.CACHE.glob("*.so"):
        shutil.copy(library, tmp_path)
    command = [sys.executable, "-c", RUN_A_COPY, str(tmp_path), str(Path(__file__).parent)]
    subprocess.run(command, cwd=Path(__file__).parents[1] / "helpers", check=True)


ONE_THREAD = dict(grid=(1, 1, 1), threadgroup=(1, 1, 1))
EVERY_ATTRIBUTE = """
  out[0] = a[0] + a_shape[0] + a_ndim + b_strides[1] + thread_position_in_grid.x
    + thread_index_in_simdgroup + threadgroups_per_grid.y + threads_per_grid.z
    + simdgroups_per_threadgroup + thread_index_in_threadgroup;
"""
SAMPLES = {
    "header": samples.matmul(mx.zeros((16, 256), mx.float16), mx.zeros((64, 256), mx.float16)),
    "every attribute, small inputs": samples.Sample(
        dict(
            name="attributes",
            input_names=["a", "b", "scalar"],
            output_names=["out", "second"],
            source=EVERY_ATTRIBUTE,
        ),
        dict(output_shapes=[(1,), (2, 2)], output_dtypes=[mx.float32, mx.uint8]) | ONE_THREAD,
        [mx.zeros((7,), mx.int32), mx.zeros((3, 4), mx.float16), mx.array(1.5)],
    ),
    "few inputs": samples.Sample(
        dict(name="plain", input_names=["a"], output_names=["b"], source="b[0] = a[0];"),
        dict(output_shapes=[(1,)], output_dtypes=[mx.int64]) | ONE_THREAD,
        [mx.zeros((9,), mx.uint64)],
    ),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_the_emulators_wrapper_is_the_text_that_mlx_generates(sample, tmp_path, capfd):
    """Without Metal, MLX cannot run a kernel, but it prints the text when it exports one."""
    kernel = mx.fast.metal_kernel(**sample.constructor)
    call = sample.call

    def function(*inputs):
        return kernel(inputs=list(inputs), verbose=True, **call)

    mx.export_function(str(tmp_path / "kernel.mlxfn"), function, *sample.inputs)
    printed = capfd.readouterr().out.split("```\n")[1]
    ours = EmulatedKernel(**sample.constructor).wrapper(sample.inputs, call["output_dtypes"])
    assert ours.text.rstrip("\n") == printed.rstrip("\n")
