"""The Metal function that `mx.fast.metal_kernel` writes around a body, and the same as C++.

The text is exactly MLX's for calls without template arguments (`write_signature` in
mlx/backend/common/metal_kernel.cpp and its caller); tests/kernels/test_metal_host.py compares it
with what MLX prints.
"""

import re
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

# The attributes that our kernels use, of those that MLX offers, in MLX's order: their types, and
# their values in terms of `place` (metal_host_thread in include/host/runtime.h).
ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": ("uint", "place->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "place->simdgroups"),
    "thread_index_in_simdgroup": ("uint", "place->lane"),
    "thread_index_in_threadgroup": ("uint", "place->index"),
    "thread_position_in_grid": ("uint3", "METAL_HOST_UINT3(grid_position)"),
    "threadgroup_position_in_grid": ("uint3", "METAL_HOST_UINT3(group_position)"),
    "threadgroups_per_grid": ("uint3", "METAL_HOST_UINT3(threadgroups)"),
    "threads_per_grid": ("uint3", "METAL_HOST_UINT3(grid)"),
}

# Inputs of fewer elements are in constant memory.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Parameter:
    """One parameter of the Metal function.

    type:    its type with the address space, such as `const device float*`
    suffix:  what follows the array's name: "", "_shape", "_strides" or "_ndim"
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
    signature: str  # up to the opening brace
    body: str

    @property
    def text(self) -> str:
        """The text that MLX compiles, without MLX's prelude of utilities."""
        return self.header + self.signature + self.body


def _input_parameters(name: str, array: mx.array, body: str) -> list[Parameter]:
    """An input, and those of its shape, strides and number of dimensions that the body names."""
    space = "constant" if array.size < CONSTANT_BELOW else "device"
    reference = "&" if array.ndim == 0 else "*"
    parameters = [Parameter(name, "", f"const {space} {METAL_NAMES[array.dtype]}{reference}")]
    described = {
        "_shape": "const constant int*",
        "_strides": "const constant int64_t*",
        "_ndim": "const constant int&",
    }
    for suffix, type_ in described.items():
        if array.ndim and name + suffix in body:
            parameters.append(Parameter(name, suffix, type_))
    return parameters


def _output_parameter(name: str, dtype: mx.Dtype) -> Parameter:
    return Parameter(name, "", f"device {METAL_NAMES[dtype]}*")


def _function_name(name: str, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> str:
    """MLX's name: with all dtypes, and `s` after that of a scalar and `c` of a constant input."""
    parts = ["custom_kernel", name]
    for array in inputs:
        size = ""
        if array.ndim == 0:
            size = "s"
        elif array.size < CONSTANT_BELOW:
            size = "c"
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
    lines += [f"  {ATTRIBUTES[name][0]} {name} [[{name}]]" for name in attributes]
    return Wrapper(
        name=function,
        parameters=tuple(parameters),
        attributes=tuple(attributes),
        header=header,
        signature=f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n",
        body=body + "\n}\n",
    )


_PRELUDE = """\
#include "host/metal.h"
#define METAL_HOST_UINT3(field) uint3(place->field[0], place->field[1], place->field[2])
"""

_ENTRY = """\
#line 1 "glue"
extern "C" METAL_HOST_EXPORT __attribute__((no_sanitize("thread")))
void metal_host_kernel(void** buffers, const metal_host_thread* place) {{
  {name}({arguments});
}}
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
extern "C" METAL_HOST_EXPORT const char* const metal_host_image[2] = {{&__ehdr_start, &_end}};
"""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

# Variables in threadgroup memory, such as `threadgroup float part[32], top[32];`. A pointer, a
# reference or a parameter does not match.
_SHARED = re.compile(
    r"(?<![\w:(,<])threadgroup\s+"
    # The type, with template arguments that may have template arguments.
    r"([\w:]+(?:\s*<[^;{}<>]*(?:<[^<>]*>)?[^;{}<>]*>)?)\s+"
    # Names and sizes: `part[32], top[32]`.
    r"(\w+\s*(?:\[[^;]*?\])*(?:\s*,\s*\w+\s*(?:\[[^;]*?\])*)*)\s*;"
)
_COMMA_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")  # no comma in brackets
_NAME_AND_SIZE = re.compile(r"\s*(\w+)\s*(.*?)\s*", re.DOTALL)  # `part` and `[32]`


def _without_comments(text: str) -> str:
    """Remove comments but not their line breaks, so that line numbers do not change."""
    return _COMMENT.sub(lambda match: "\n" * match.group().count("\n") or " ", text)


def _define_shared(match: re.Match[str]) -> str:
    """The same variables, each defined by a macro that puts it into the emulated memory.

    As many lines as before, because the compiler's messages are to name the kernel's lines.
    """
    type_, declarations = match.groups()
    definitions = []
    for declaration in _COMMA_BETWEEN_NAMES.split(declarations):
        name, size = _NAME_AND_SIZE.fullmatch(declaration).groups()
        definitions.append(f"METAL_HOST_SHARED({name}, ({type_}), ({size}));")
    line_breaks = "\n" * match.group().count("\n")
    return " ".join(definitions).replace("\n", " ") + line_breaks


def shared_names(body: str) -> list[str]:
    """The variables in threadgroup memory that a kernel's body defines."""
    text = _without_comments(body)
    declared = ",".join(match.group(2) for match in _SHARED.finditer(text))
    # Each name, before its sizes in brackets if it has any.
    return re.findall(r"(\w+)\s*(?:\[[^,]*\]\s*)*(?:,|$)", declared)


def sources(wrapper: Wrapper) -> tuple[str, str, str]:
    """Header, signature and body as C++, without comments and with the same line numbers."""
    return tuple(
        _SHARED.sub(_define_shared, _without_comments(text))
        for text in (wrapper.header, wrapper.signature.replace("[[kernel]] ", ""), wrapper.body)
    )


def _source(wrapper: Wrapper) -> str:
    """The function. The compiler reports lines of header and body, which both begin at 1."""
    header, signature, body = sources(wrapper)
    return f'{_PRELUDE}#line 1 "header"\n{header}{signature}#line 1 "body"\n{body}'


def _argument(index: int, type_: str) -> str:
    """The address `buffers[index]` as an argument of a parameter's type."""
    bare = type_.replace("device ", "").replace("constant ", "")
    if bare.endswith("&"):
        return f"*({bare[:-1]}*)buffers[{index}]"
    return f"({bare})buffers[{index}]"


def program(wrapper: Wrapper) -> str:
    """C++ with the entry `metal_host_kernel(buffers, place)`, which runs one thread of the kernel.

    `buffers` holds an address for each parameter, in their order.
    """
    arguments = [_argument(i, p.type) for i, p in enumerate(wrapper.parameters)]
    arguments += [ATTRIBUTES[name][1] for name in wrapper.attributes]
    entry = _ENTRY.format(name=wrapper.name, arguments=", ".join(arguments))
    return _source(wrapper) + entry
