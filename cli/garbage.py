"""No search for garbage while a program starts: what is imported and loaded stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Do not look for garbage meanwhile, nor ever among what is there by then.

    Each time that some hundred objects were made, Python looks through them for garbage, and at
    times through all. Imports make a hundred thousand objects and hardly any garbage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
