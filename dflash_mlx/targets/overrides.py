"""Giving single module *instances* another `__call__` during a forward.

For the length of a forward each instance gets a subclass of its own class. Nothing is installed
between forwards: an abandoned request leaves no trace, and parameter names, quantization and other
models of the same class stay as they are. (Wrapping modules would change parameter paths; patching
a class would reach every model.) The target's lock keeps forwards of different threads apart. Code
that looks at module classes, like the methods here, holds it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..threads import clean_up_at_end

Entry = tuple[nn.Module, type]  # an instance, and its class during a forward


class Overrides:
    """Module instances of one target, and what is called in their place.

    Args:
        lock: the target's, held while the set is installed.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.entries: list[Entry] = []

    def replace(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Have `call(module, *args, **kwargs)` run instead of the module's own `__call__`."""
        cls = self._class_of(module)
        self.entries.append((module, type(cls.__name__, (cls,), {"__call__": call})))

    def watch(self, module: nn.Module, seen: Callable[[Any, Any], None]) -> None:
        """Have `seen(first argument, result)` run after each call of the module.

        The call is the module's own, or what replaces it in this set so far.
        """
        own = self._class_of(module).__call__

        def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            result = own(self, x, *args, **kwargs)
            seen(x, result)
            return result

        self.replace(module, call)

    def _class_of(self, module: nn.Module) -> Any:
        """The module's class under this set: of its last entry, or its own."""
        for one, cls in reversed(self.entries):
            if one is module:
                return cls
        return type(module)

    @contextmanager
    def installed(self, *others: Overrides) -> Iterator[None]:
        """Install these overrides, then `others` of the same target, for the forwards inside.

        Of several entries for one module, the last one counts.
        """
        clean_up_at_end()
        with self._lock:
            originals: list[Entry] = []
            # MLX's own __setattr__ looks for parameters first.
            try:
                for overrides in (self, *others):
                    for module, cls in overrides.entries:
                        originals.append((module, type(module)))
                        object.__setattr__(module, "__class__", cls)
                yield
            finally:
                for module, cls in reversed(originals):
                    object.__setattr__(module, "__class__", cls)


def rebind_globals(call: Any, **names: Any) -> Callable[..., Any]:
    """A function with the code of `call`, in which these global names have other values."""
    code, scope = call.__code__, {**call.__globals__, **names}
    other = FunctionType(code, scope, call.__name__, call.__defaults__, call.__closure__)
    other.__kwdefaults__ = call.__kwdefaults__
    return other
