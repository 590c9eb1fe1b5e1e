"""Functions of arrays that `mx.compile` traces once per shape, and replays without Python.

Building a graph in Python takes longer than a small model's products take a CPU, and a GPU waits
for it. A trace is valid for one shape: the number of rows, the keys that they attend to, the room
in the caches. A shape is traced when it comes a second time, because some come only once, such as
that of a text's last step.

MLX keeps traces per thread, and so does this. On a CPU nothing in a trace is fused
(`machine.fusion`), so that it has the bits of the same function without a trace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MOST_TRACES = 64  # of one `Traces`, in each thread

Shape = tuple[Any, ...]


class UntraceableError(Exception):
    """A function cannot be traced, for a reason that users can read."""


class _ThreadTraces(threading.local):
    """The traced functions of one thread, the one used last at the end."""

    def __init__(self) -> None:
        self.functions: OrderedDict[Shape, Callable[..., Any]] = OrderedDict()
        self.seen: set[Shape] = set()  # shapes that came once


class Traces:
    """The traces of one model's functions.

    Args:
        errors: what models raise when their code cannot be traced.

    Attributes:
        why_not: what keeps functions from being traced; None as long as nothing has.
        count: how often a shape was traced.
    """

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        self._errors: tuple[type[BaseException], ...] = (*errors, UntraceableError)
        self._of_thread = _ThreadTraces()
        self.why_not: str | None = None
        self.count = 0

    def call(self, shape: Shape, make: Callable[[], Callable[..., Any]], *arguments: Any) -> Any:
        """Call a function from its trace, or trace it; None if it is to be run without a trace.

        Not to be called once there is a `why_not`.

        Args:
            shape: everything that the function's graph depends on except the contents of arrays.
            make: makes the function. It must not refer to a request, for it is kept.
            arguments: of the function.
        """
        functions = self._of_thread.functions
        function = functions.get(shape)
        if function is not None:
            functions.move_to_end(shape)
            return function(*arguments)
        if shape not in self._of_thread.seen:
            self._of_thread.seen.add(shape)
            return None
        function = make()
        self.count += 1
        try:
            results = function(*arguments)
        except self._errors as error:
            self.why_not = str(error).splitlines()[0]
            return None
        functions[shape] = function
        if len(functions) > MOST_TRACES:
            functions.popitem(last=False)
        return results
