"""The emulator: it names each of the bugs that Metal kernels have, and rounds as Metal does."""

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


def test_a_variable_never_set_is_not_zero():
    """A thread's own memory is not checked, but what is wrong there shows in the result."""
    (right,) = sample().run()
    (wrong,) = planted("> low(0), high(0);", "> low, high(0);").run()
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


def run(body: str, *inputs: mx.array, threads: int = 64, dtype: mx.Dtype = mx.float32):
    """What `body` leaves in `out` [threads]; its inputs are a, b and c, and `t` is its thread."""
    source = f"const uint t = thread_position_in_grid.x;\n{body}"
    kernel = EmulatedKernel(
        "body", input_names=list("abc"[: len(inputs)]), output_names=["out"], source=source
    )
    size = dict(grid=(threads, 1, 1), threadgroup=(threads, 1, 1))
    (out,) = kernel(inputs=inputs, output_shapes=[(threads,)], output_dtypes=[dtype], **size)
    return out


@pytest.mark.parametrize("threads", [1, 64])
def test_too_much_private_memory_is_found(threads):
    """And the next launch finds every thread's stack in order again."""
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
    """Including the intermediate ones: half(half(a * b) + c), as Metal has no wider half."""
    a, b, c = (mx.random.normal((64,), key=mx.random.key(i)).astype(dtype) for i in range(3))
    wide = (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype).astype(mx.float32)
    expected = (wide + c.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(run("out[t] = a[t] * b[t] + c[t];", a, b, c, dtype=dtype), expected)


def test_bfloat_rounds_to_even_and_keeps_infinities():
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, 1e-40, 0.1]
    given = mx.array(np.resize(np.array(ties, np.float32), 64))
    got = run("out[t] = bfloat(a[t]);", given, dtype=mx.bfloat16)
    assert mx.array_equal(got, given.astype(mx.bfloat16))


def test_simdgroup_barrier_orders_its_own_lanes_only():
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


def test_a_copied_cache_has_a_runtime_of_its_own(tmp_path):
    """A copy's kernels once loaded the original's library as well, and the process died."""
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
def test_wrapper_is_the_text_of_mlx(sample, tmp_path, capfd):
    """Letter for letter. Without Metal MLX cannot run a kernel, but it can export one."""
    kernel = mx.fast.metal_kernel(**sample.constructor)
    call = sample.call

    def function(*inputs):
        return kernel(inputs=list(inputs), verbose=True, **call)

    mx.export_function(str(tmp_path / "kernel.mlxfn"), function, *sample.inputs)
    printed = capfd.readouterr().out.split("```\n")[1]
    ours = EmulatedKernel(**sample.constructor).wrapper(sample.inputs, call["output_dtypes"])
    assert ours.text.rstrip("\n") == printed.rstrip("\n")
