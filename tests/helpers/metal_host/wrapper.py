"""The Metal function that `mx.fast.metal_kernel` writes around the body it is given.

The text is MLX's own, letter for letter (`write_signature` in mlx/backend/common/metal_kernel.cpp
and its caller), of calls without template arguments; tests/kernels/test_metal_host_wrapper.py
compares it with what MLX prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

METAL_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
}

# What a body may ask for by name, in the order in which MLX looks for it.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Inputs of fewer elements go to constant memory.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Parameter:
    """One parameter of the Metal function.

    type:    its type, address space included, as `const device float*`
    suffix:  what the array's own name is followed by: "", "_shape", "_strides" or "_ndim"
    """

    array: str
    suffix: str
    type: str

    @property
    def name(self) -> str:
        return self.array + self.suffix


@dataclass(frozen=True)
class Wrapper:
    """A kernel's function for certain inputs: its name, parameters, and text in two parts."""

    name: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]
    header: str
    signature: str  # all up to the opening brace
    body: str

    @property
    def text(self) -> str:
        """All that MLX compiles, but for its own prelude of utilities."""
        return self.header + self.signature + self.body


def _input_parameters(name: str, array: mx.array, body: str) -> list[Parameter]:
    space = "constant" if array.size < CONSTANT_BELOW else "device"
    reference = "&" if array.ndim == 0 else "*"
    found = [Parameter(name, "", f"const {space} {METAL_NAMES[array.dtype]}{reference}")]
    described = {
        "_shape": "const constant int*",
        "_strides": "const constant int64_t*",
        "_ndim": "const constant int&",
    }
    for suffix, type_ in described.items():
        if array.ndim and name + suffix in body:
            found.append(Parameter(name, suffix, type_))
    return found


def _output_parameter(name: str, dtype: mx.Dtype) -> Parameter:
    return Parameter(name, "", f"device {METAL_NAMES[dtype]}*")


def _function_name(name: str, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> str:
    parts = ["custom_kernel", name]
    for array in inputs:
        size = "s" if array.ndim == 0 else "c" if array.size < CONSTANT_BELOW else ""
        parts.append(METAL_NAMES[array.dtype] + size)
    return "_".join(parts + [METAL_NAMES[dtype] for dtype in outputs])


def wrap(
    name: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    header: str,
    body: str,
) -> Wrapper:
    """The function that MLX would compile for these arguments."""
    function = _function_name(name, [x for _, x in inputs], [dtype for _, dtype in outputs])
    parameters = [
        parameter for key, array in inputs for parameter in _input_parameters(key, array, body)
    ]
    parameters += [_output_parameter(key, dtype) for key, dtype in outputs]
    attributes = [attribute for attribute in ATTRIBUTES if attribute in body]
    lines = [f"  {p.type} {p.name} [[buffer({i})]]" for i, p in enumerate(parameters)]
    lines += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in attributes]
    return Wrapper(
        name=function,
        parameters=tuple(parameters),
        attributes=tuple(attributes),
        header=header,
        signature=f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n",
        body=body + "\n}\n",
    )
