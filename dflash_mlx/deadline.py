"""Calls a function and stops it if it takes too long."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

AGAIN = 0.1  # seconds between two attempts to end a thread


def run_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function and return its result. Raises its error, or `TimeoutError` after `seconds`.

    The function runs in a new thread, which is stopped between two instructions of Python. Nothing
    can stop a single instruction that takes forever, such as 9 ** 9 ** 9, and memory is not
    limited: this guards against mistakes, not attacks.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=run, daemon=True)
    try:
        thread.start()
        return outcome.result(seconds)
    finally:
        if not (outcome.cancel() or outcome.done()):  # the function is still running
            Thread(target=_end, args=(thread, outcome), daemon=True).start()


def _end(thread: Thread, outcome: Future[T]) -> None:
    """Raise `SystemExit` in a thread until it ends.

    Raising it once is not enough: if the thread is in a finalizer (`__del__`), Python drops the
    exception.
    """
    exception = ctypes.py_object(SystemExit)
    while thread.is_alive() and not outcome.done():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), exception)
        thread.join(AGAIN)
