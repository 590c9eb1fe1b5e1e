"""Single module instances that run other code than their class.

Such an instance gets a subclass of its own class. Parameter names, quantization and other models of
the same class stay as they are. (Wrapping modules would change parameter paths; patching a class
would reach every model.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mlx.nn as nn

Call = Callable[..., Any]


def override(module: nn.Module, make: Callable[[Call], Call], by: object = None) -> None:
    """Replace the call of a module by `make(call)`, where `call` is the present one.

    Args:
        module: the module.
        make: makes the new call.
        by: who overrides, for `is_overridden`.
    """
    _set_class(module, _subclass(module, make, by))


def is_overridden(module: nn.Module, by: object) -> bool:
    """Whether `override` has replaced the call of a module for `by`."""
    return any(vars(cls).get("overridden_by") is by for cls in type(module).__mro__)


def stock_class(module: nn.Module) -> type:
    """Return a module's class before any `override`."""
    cls = type(module)
    stock: type = getattr(cls, "stock_class", cls)
    return stock


@contextmanager
def overridden(calls: Sequence[tuple[nn.Module, Callable[[Call], Call]]]) -> Iterator[None]:
    """Override modules while the body of the `with` statement runs."""
    classes = [(module, type(module)) for module, _ in calls]
    try:
        for module, make in calls:
            override(module, make)
        yield
    finally:
        for module, cls in reversed(classes):
            _set_class(module, cls)


def rebind_globals(call: Any, **names: Any) -> Call:
    """Copy the function `call`, with other values for some of its global names."""
    copy = FunctionType(
        call.__code__,
        {**call.__globals__, **names},
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
    copy.__kwdefaults__ = call.__kwdefaults__
    return copy


def _subclass(module: nn.Module, make: Callable[[Call], Call], by: object) -> type:
    cls: Any = type(module)
    fields = {
        "__call__": make(cls.__call__),
        "stock_class": stock_class(module),
        "overridden_by": by,
    }
    return type(cls.__name__, (cls,), fields)


def _set_class(module: nn.Module, cls: type) -> None:
    # MLX's own __setattr__ looks for parameters first.
    object.__setattr__(module, "__class__", cls)
