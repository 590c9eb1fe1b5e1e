"""What MLX asks of a program with threads: how a request can go on in another one, and end well.

A lazy array belongs to the stream that it was made on, and that stream to one thread. Computed in
another it raises "There is no Stream(...) in current thread"; an array that is computed, or on its
way, may be used by all. So nothing lazy crosses from one thread to another here:

    a target, a drafter   are computed when they are made (`evaluate`), with the arrays that are no
                          parameters, as the frequencies of a rotary embedding
    between two rounds    caches, waiting features and histories are on their way: whoever changes
                          them ends with `mx.async_eval`, which waits for nothing

And what a thread compiled goes with the thread. MLX frees it in the destructors of C++, for which
it needs Python's lock; in a thread that ends beside the interpreter the lock is gone, and the
process aborts. `mx.clear_streams` is MLX's remedy, to be called at the end of each thread, as
`clean_up_at_end` sees to. Nothing helps a daemon thread that still runs when the interpreter ends:
Python before 3.14 kills it, destructors and all. End your threads, or let them wait for something.
"""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# Nothing is shared in it, and nothing else would do: a thread's own values go when it ends, in the
# thread itself and before it can be joined. An attribute of its Thread goes when somebody forgets
# that, in whichever thread they do.
_ending = threading.local()


class _Cleanup:
    """Forgets a thread's compiled functions and streams when the thread's own values go."""

    def __init__(self) -> None:
        self._thread, self._clear = threading.get_ident(), mx.clear_streams

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # else the interpreter ends, not the thread
            self._clear()


def clean_up_at_end() -> None:
    """Have MLX forget what it keeps for the calling thread when that ends; once is enough.

    The main thread needs none. Nor can a thread that Python has not started be helped: it may come
    back after Python has forgotten it, and would miss its streams.
    """
    if hasattr(_ending, "cleanup"):
        return
    thread = threading.current_thread()
    ours = thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    _ending.cleanup = _Cleanup() if ours else None


def evaluate(model: nn.Module) -> None:
    """Compute every array in a model, its parameters and all others."""

    def holds_arrays(module: nn.Module, name: str, value: object) -> bool:
        return isinstance(value, mx.array | dict | list | tuple)

    mx.eval([value for _, value in tree_flatten(model.filter_and_map(holds_arrays))])
