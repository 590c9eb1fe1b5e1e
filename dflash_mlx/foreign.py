"""Where the errors of other libraries become ours.

mlx-lm, transformers, tokenizers and MLX were written for files that are whole. Fed with damaged
ones they raise whatever Python raises on the way: a `KeyError` for a field, an `AttributeError`
for a list in place of an object, a `ZeroDivisionError` for no heads. What they may raise is listed
here, once; anything else is a bug of ours or of theirs, and is not hidden.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError

from .errors import DFlashError
from .reading import reason

_KNOWN = (
    ArithmeticError,  # ZeroDivisionError, OverflowError: a size of 0, a number too large for C
    AssertionError,  # what mlx-lm's models demand of their config
    AttributeError,  # a list in place of an object, a class that there is not
    ImportError,  # a model_type, tool parser or tokenizer without its module or package
    LookupError,  # KeyError, IndexError: a field, token or layer that is missing
    MemoryError,  # a size that no machine has
    OSError,  # a file that is missing or may not be read
    SyntaxError,  # jinja writes Python of a template, and {% break %} may stand outside of a loop
    RuntimeError,  # MLX's own; RecursionError and NotImplementedError are such, too
    TypeError,  # text in place of a number
    ValueError,  # MLX's for shapes, mlx-lm's for weights that do not fit; UnicodeError is one
    StrictDataclassError,  # transformers', for a field of config.json with another type
    TemplateError,  # of chat templates: their syntax, undefined names, what the sandbox forbids
)


class Foreign(AbstractContextManager["Foreign", None]):
    """A context in which other libraries work: what they raise leaves it as `error`.

    Args:
        error: the error to raise instead.
        message: what is wrong; the library's own reason follows in brackets.
    """

    def __init__(self, error: type[DFlashError], message: str) -> None:
        self._error, self._message = error, message

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise our error in place of a known one."""
        if error is None or isinstance(error, DFlashError):
            return
        kind = type(error)
        if issubclass(kind, _KNOWN) or _is_from_rust(kind):
            # A KeyError says only the key; these say what is wrong.
            speaks = kind is Exception or issubclass(kind, OSError | ValueError | TemplateError)
            name = "" if speaks else f"{kind.__name__}: "
            raise self._error(f"{self._message} ({name}{reason(error)}).") from error


def _is_from_rust(kind: type[BaseException]) -> bool:
    """Whether tokenizers raised this: bare `Exception`s, and its panics, which nothing exports."""
    return kind is Exception or (kind.__module__, kind.__name__) == (
        "pyo3_runtime",
        "PanicException",
    )
