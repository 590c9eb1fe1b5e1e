"""A launch of a compiled kernel over buffers in memory, and its findings.

The structures are those of runtime/buffers.h.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from metal_host.compiler import load, source_line

RED_ZONE = 4096  # bytes before and after every buffer, where wrong accesses are found; kRedZone
_WRITABLE = 1
_INITIALISED = 2


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("image", ctypes.c_void_p * 2),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("first_group", ctypes.c_uint32),
        ("last_group", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
    ]


@dataclass(frozen=True)
class Finding:
    """A finding of a checked launch: kind, message, source line, and how often it occurred."""

    kind: str
    message: str
    where: str
    count: int

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"{self.kind}{where} ({self.count}x): {self.message}"


class CheckError(RuntimeError):
    """A kernel did something that a Metal kernel must not do; see `findings`."""

    def __init__(self, kernel: str, findings: Sequence[Finding]):
        super().__init__("\n  ".join([f"{kernel}:", *map(str, findings)]))
        self.findings = tuple(findings)


class Memory:
    """A buffer of a launch: the bytes of `values` between two red zones, strides kept."""

    def __init__(self, name: str, values: np.ndarray, writable: bool, initialised: bool):
        low, high = np.lib.array_utils.byte_bounds(values)
        size = high - low if values.size else 0
        room = np.zeros(size + 3 * RED_ZONE, np.uint8)  # two red zones, and one to align them
        begin = RED_ZONE + -room.ctypes.data % RED_ZONE  # page-aligned, as Metal's buffers are
        ctypes.memmove(room.ctypes.data + begin, low, size)
        self.name = name
        self.size = size
        self.flags = writable * _WRITABLE + initialised * _INITIALISED
        self.values = np.ndarray(
            values.shape,
            values.dtype,
            room,
            begin + (values.__array_interface__["data"][0] - low if size else 0),
            values.strides,
        )

    def described(self) -> _Buffer:
        element = self.values.itemsize
        return _Buffer(self.name.encode(), self.values.ctypes.data, self.size, element, self.flags)


def _findings(runtime: ctypes.CDLL, library: Path) -> list[Finding]:
    runtime.metal_host_findings.restype = ctypes.c_char_p
    # By kind and line, because a line may be compiled to several accesses.
    findings: dict[tuple[str, str], Finding] = {}
    for line in runtime.metal_host_findings().decode().splitlines():
        kind, offset, count, message = line.split("\t")
        key = kind, source_line(library, int(offset))
        if key in findings:
            findings[key] = replace(findings[key], count=findings[key].count + int(count))
        else:
            findings[key] = Finding(kind, message=message, where=key[1], count=int(count))
    return list(findings.values())


def launch(
    name: str,
    runtime: Path,
    library: Path,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    memory: Sequence[Memory],
    groups: range = range(2**32 - 1),
) -> None:
    """Runs a compiled kernel over `grid` threads, in place.

    memory: a buffer for each parameter of the kernel.
    groups: the threadgroups that run, counted along x, then y, then z; by default all.

    Raises CheckError for findings.
    """
    host = load(runtime)
    kernel = load(library)
    image = (ctypes.c_void_p * 2).in_dll(kernel, "metal_host_image")
    buffers = (_Buffer * len(memory))(*(each.described() for each in memory))
    function = ctypes.cast(kernel.metal_host_kernel, ctypes.c_void_p)
    described = _Launch(
        function,
        image,
        tuple(grid),
        tuple(threadgroup),
        groups[0],
        groups[-1],
        len(memory),
        buffers,
    )
    host.metal_host_launch(ctypes.byref(described))
    findings = _findings(host, library)
    if findings:
        raise CheckError(name, findings)
