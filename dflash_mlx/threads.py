"""What MLX needs in a program with threads.

A lazy array belongs to the stream that made it, and the stream to one thread. Evaluated in another
it raises "There is no Stream(...) in current thread". An array that is computed, or being computed,
can be used by every thread. So no lazy array crosses from one thread to another here:

    a target, a drafter   `evaluate` computes all of their arrays when they are made, with those
                          that are no parameters, such as rotary frequencies
    between two steps     whatever changes caches, waiting features or histories ends with
                          `mx.async_eval`, which does not wait

MLX also keeps compiled functions per thread, and frees them in C++ destructors that need Python's
lock. In a thread that ends together with the interpreter the lock is gone, and the process aborts.
`mx.clear_streams` at the end of each thread prevents this; `clean_up_at_end` arranges it. It does
not help daemon threads: do not decode in them.
"""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# A thread's own values are deleted in the thread itself when it ends, before it can be joined.
# No other hook runs there. Nothing is shared in it.
_at_end = threading.local()


class _Cleanup:
    """Clears MLX's streams of a thread when the thread's own values are deleted."""

    def __init__(self) -> None:
        self._thread, self._clear = threading.get_ident(), mx.clear_streams

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # otherwise the interpreter ends, not the thread
            self._clear()


def clean_up_at_end() -> None:
    """Have MLX free what it keeps for the calling thread when the thread ends.

    Calling it once per thread is enough. It does nothing for the main thread, nor for threads that
    Python did not start: those may return after Python has forgotten them.
    """
    if hasattr(_at_end, "cleanup"):
        return
    thread = threading.current_thread()
    ours = thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    _at_end.cleanup = _Cleanup() if ours else None


def evaluate(model: nn.Module) -> None:
    """Compute every array in a model, its parameters and all others."""

    def holds_arrays(module: nn.Module, name: str, value: object) -> bool:
        return isinstance(value, mx.array | dict | list | tuple)

    mx.eval([value for _, value in tree_flatten(model.filter_and_map(holds_arrays))])
