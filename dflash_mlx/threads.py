"""Rules and helpers for using MLX in a program with threads.

A lazy array belongs to the stream that made it, and the stream to one thread. Another thread that
evaluates the array gets "There is no Stream(...) in current thread". An array that is computed, or
being computed, can be used by every thread. So lazy arrays never cross from one thread to another:

    targets and drafters   `evaluate` computes all of their arrays when they are made, including
                           those that are not parameters, such as rotary frequencies
    between two steps      code that changes caches, waiting features or histories ends with
                           `mx.async_eval`, which does not wait

MLX also keeps compiled functions per thread, and frees them in C++ destructors that need Python's
lock. If a thread ends together with the interpreter, the lock is gone, and the process aborts.
`mx.clear_streams` at the end of each thread prevents this, and `clean_up_at_end` arranges it. It
does not help daemon threads: do not decode in them.
"""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# Thread-local values are deleted in their thread when it ends, before it can be joined. Python has
# no other hook that runs there.
_at_end = threading.local()


class _Cleanup:
    """Clears MLX's streams of a thread when the thread's local values are deleted."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clear = mx.clear_streams

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # otherwise the interpreter ends, not the thread
            self._clear()


def clean_up_at_end() -> None:
    """Make MLX free what it keeps for the calling thread when the thread ends.

    One call per thread is enough. It does nothing in the main thread, nor in threads that Python
    did not start: those may call Python again after Python has forgotten them.
    """
    if hasattr(_at_end, "cleanup"):
        return
    thread = threading.current_thread()
    is_foreign = isinstance(thread, threading._DummyThread)
    is_main = thread is threading.main_thread()
    _at_end.cleanup = None if is_main or is_foreign else _Cleanup()


def evaluate(model: nn.Module) -> None:
    """Compute every array in a model, including those that are not parameters."""

    def holds_arrays(module: nn.Module, name: str, value: object) -> bool:
        return isinstance(value, mx.array | dict | list | tuple)

    mx.eval([value for _, value in tree_flatten(model.filter_and_map(holds_arrays))])
