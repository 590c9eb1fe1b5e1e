"""From the text of a Metal function to C++ that the runtime can call for one thread."""

import re

from metal_host.wrapper import Wrapper

# Attributes, in terms of `place`: metal_host_thread of include/host/runtime.h. Those that no kernel
# asks for are not here.
_ATTRIBUTE_VALUES = {
    "simdgroup_index_in_threadgroup": "place->simdgroup",
    "simdgroups_per_threadgroup": "place->simdgroups",
    "thread_index_in_simdgroup": "place->lane",
    "thread_index_in_threadgroup": "place->index",
    "thread_position_in_grid": "METAL_HOST_UINT3(grid_position)",
    "threadgroup_position_in_grid": "METAL_HOST_UINT3(group_position)",
    "threadgroups_per_grid": "METAL_HOST_UINT3(threadgroups)",
    "threads_per_grid": "METAL_HOST_UINT3(grid)",
}

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

# `threadgroup float part[32], top[32];` defines variables; a pointer, a reference or a parameter
# does not match.
_SHARED = re.compile(
    r"(?<![\w:(,<])threadgroup\s+"
    r"([\w:]+(?:\s*<[^;{}<>]*(?:<[^<>]*>)?[^;{}<>]*>)?)\s+"
    r"(\w+\s*(?:\[[^;]*?\])*(?:\s*,\s*\w+\s*(?:\[[^;]*?\])*)*)\s*;"
)


def _without_comments(text: str) -> str:
    """The same lines: comments leave their line breaks."""
    return _COMMENT.sub(lambda found: "\n" * found.group().count("\n") or " ", text)


def _define_shared(found: re.Match[str]) -> str:
    type_, names = found.groups()
    lines = found.group().count("\n")
    definitions = []
    for declared in re.split(r",(?![^\[]*\])", names):
        name, size = re.fullmatch(r"\s*(\w+)\s*(.*?)\s*", declared, re.DOTALL).groups()
        definitions.append(f"METAL_HOST_SHARED({name}, ({type_}), ({size}));")
    return " ".join(definitions).replace("\n", " ") + "\n" * lines


def shared_names(body: str) -> list[str]:
    """The variables in threadgroup memory that a kernel's body defines."""
    text = _without_comments(body)
    declared = ",".join(found.group(2) for found in _SHARED.finditer(text))
    return re.findall(r"(\w+)\s*(?:\[[^,]*\]\s*)*(?:,|$)", declared)


def sources(wrapper: Wrapper) -> tuple[str, str, str]:
    """Header, signature and body as C++: no comments, the same lines."""
    return tuple(
        _SHARED.sub(_define_shared, _without_comments(text))
        for text in (wrapper.header, wrapper.signature.replace("[[kernel]] ", ""), wrapper.body)
    )


def _source(wrapper: Wrapper) -> str:
    """The function itself. Header and body both begin at line 1 of what the compiler reports."""
    header, signature, body = sources(wrapper)
    return f'{_PRELUDE}#line 1 "header"\n{header}{signature}#line 1 "body"\n{body}'


def _argument(index: int, type_: str) -> str:
    bare = type_.replace("device ", "").replace("constant ", "")
    if bare.endswith("&"):
        return f"*({bare[:-1]}*)buffers[{index}]"
    return f"({bare})buffers[{index}]"


def program(wrapper: Wrapper) -> str:
    """C++ with the entry `metal_host_kernel(buffers, place)`, which runs the kernel's one thread.

    `buffers` holds an address for each parameter, in their order.
    """
    arguments = [_argument(i, p.type) for i, p in enumerate(wrapper.parameters)]
    arguments += [_ATTRIBUTE_VALUES[name] for name in wrapper.attributes]
    entry = _ENTRY.format(name=wrapper.name, arguments=", ".join(arguments))
    return _source(wrapper) + entry
