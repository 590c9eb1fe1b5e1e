"""The emulator's text of a kernel against the text that MLX prints, letter for letter."""

import os
import sys

import mlx.core as mx
import pytest
from metal_host import samples
from metal_host.wrapper import wrap

EVERY_ATTRIBUTE = """
  out[0] = a[0] + a_shape[0] + a_ndim + b_strides[1]
    + thread_position_in_grid.x + thread_index_in_quadgroup + grid_size.y + threads_per_grid.z
    + dispatch_simdgroups_per_threadgroup + threads_per_simdgroup + thread_execution_width;
"""


def printed_by_mlx(sample: samples.Sample, folder) -> str:
    """What MLX would compile. Without Metal it cannot run a kernel, but it can export one."""
    kernel = mx.fast.metal_kernel(**sample.constructor)

    def function(*inputs):
        return kernel(inputs=list(inputs), verbose=True, **sample.call)

    seen = folder / "printed"
    sys.stdout.flush()
    stdout = os.dup(1)
    with seen.open("w") as file:
        os.dup2(file.fileno(), 1)  # C++ prints past sys.stdout
        try:
            mx.export_function(str(folder / "kernel.mlxfn"), function, *sample.inputs)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    return seen.read_text().split("```\n")[1]


def written_by_us(sample: samples.Sample) -> str:
    given, call = sample.constructor, sample.call
    return wrap(
        given["name"],
        list(zip(given["input_names"], sample.inputs, strict=True)),
        list(zip(given["output_names"], call["output_dtypes"], strict=True)),
        given.get("header", ""),
        given["source"],
    ).text


def with_every_attribute() -> samples.Sample:
    given = dict(
        name="attributes",
        input_names=["a", "b", "scalar"],
        output_names=["out", "second"],
        source=EVERY_ATTRIBUTE,
    )
    call = dict(
        output_shapes=[(1,), (2, 2)],
        output_dtypes=[mx.float32, mx.uint8],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    inputs = [mx.zeros((7,), mx.int32), mx.zeros((3, 4), mx.float16), mx.array(1.5)]
    return samples.Sample(given, call, inputs)


SAMPLES = {
    "header": samples.matmul(mx.zeros((16, 256), mx.float16), mx.zeros((64, 256), mx.float16)),
    "small inputs": with_every_attribute(),
    "few inputs": samples.Sample(
        dict(name="plain", input_names=["a"], output_names=["b"], source="b[0] = a[0];"),
        dict(
            output_shapes=[(1,)],
            output_dtypes=[mx.int64],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        ),
        [mx.zeros((9,), mx.uint64)],
    ),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_wrapper_is_the_text_of_mlx(sample, tmp_path):
    assert written_by_us(sample).rstrip("\n") == printed_by_mlx(sample, tmp_path).rstrip("\n")
