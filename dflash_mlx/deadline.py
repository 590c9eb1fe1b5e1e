"""A call that is ended if it takes too long."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import TypeVar

T = TypeVar("T")


def run_within(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns or raises. Raises `TimeoutError` if it takes longer.

    It runs in a thread of its own, which is then ended between two instructions of Python. Nothing
    can end a single one that takes for ever, such as 9 ** 9 ** 9, and no memory is counted: this is
    for mistakes, not for attacks.
    """
    executor = ThreadPoolExecutor(1)
    thread = executor.submit(get_ident).result()
    outcome = executor.submit(function)
    try:
        return outcome.result(seconds)
    finally:
        if not outcome.done():
            exception = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
        executor.shutdown(wait=False)
