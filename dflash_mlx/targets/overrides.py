"""Giving chosen module *instances* another `__call__` while a forward runs.

Each instance gets a subclass of its own class for the length of the forward, and its own class
back afterwards. Nothing is installed between forwards, so an abandoned request leaves no trace,
two requests never meet, and parameter names, quantization and other models of the same class are
untouched. (Wrapping the modules instead would change parameter paths; patching a class would
reach every model.) A lock of the target's keeps the forwards of two threads apart, and whoever
looks at classes, as these methods do, holds it too; it is never held between forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..threads import clean_up_at_end

Entry = tuple[nn.Module, type]  # an instance, and its class while a forward runs


class Overrides:
    """A set of module instances of one target, and what is called in their place.

    Args:
        lock: the target's, held while the set is installed.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.entries: list[Entry] = []

    def replace(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Have `call(module, *args, **kwargs)` run instead of the module's own `__call__`."""
        cls = type(module)
        self.entries.append((module, type(cls.__name__, (cls,), {"__call__": call})))

    def watch(self, module: nn.Module, seen: Callable[[Any, Any], None]) -> None:
        """Have `seen(first argument, result)` run after each call of the module."""
        own = type(module).__call__

        def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            result = own(self, x, *args, **kwargs)
            seen(x, result)
            return result

        self.replace(module, call)

    def installed(self, *others: Overrides) -> AbstractContextManager[Any]:
        """Install the subclasses for the forwards run inside, and take them away afterwards.

        `others` are sets of the same target to install as well; of a module that is in several,
        the last one counts.
        """
        clean_up_at_end()
        entries = self.entries
        if others:
            entries = [entry for one in (self, *others) for entry in one.entries]
        return swapped(entries, self._lock) if entries else self._lock


@contextmanager
def swapped(
    entries: Sequence[Entry], lock: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Have modules be of other classes meanwhile; of a module's several, the last one counts.

    Args:
        entries: the modules, and their classes.
        lock: the target's; None where it is held already.
    """
    with lock or nullcontext():
        originals = [(module, type(module)) for module, _ in entries]
        try:
            _put(entries)
            yield
        finally:
            _put(originals)


def _put(entries: Sequence[Entry]) -> None:
    for module, cls in entries:
        object.__setattr__(module, "__class__", cls)  # MLX's own would look for parameters first


def rebound(call: Any, **names: Any) -> Callable[..., Any]:
    """A function of the same code as `call`, in which these global names mean something else."""
    other = FunctionType(
        call.__code__,
        {**call.__globals__, **names},
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
    other.__kwdefaults__ = call.__kwdefaults__
    return other
