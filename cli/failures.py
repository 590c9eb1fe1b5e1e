"""Turns errors into one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer

from dflash_mlx.errors import (
    DFlashError,
    PromptError,
    SettingsError,
    UnsupportedTreeError,
    error_of_import,
)
from dflash_mlx.settings import SETTINGS

from .output import error_line, note

# Exit codes.
FAILED = 1
USAGE = 2
# A pattern of settings that the library spells with _ and the command line with -.
LONG_NAMES = "|".join(name for name, setting in SETTINGS.items() if "_" in name and setting.metavar)
WRONG_USAGE = (SettingsError, PromptError, UnsupportedTreeError)  # they exit with `USAGE`
UsageError: Any = typer.BadParameter.__base__  # Typer does not export it
# The type of a validation error of pydantic -> the allowed values in words.
EXPECTED = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error that a person can act on, and exit; others are bugs."""
    try:
        yield
    except KeyboardInterrupt as error:
        if str(error):
            note(str(error))
        raise
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # Typer prints the help
            raise
        error_line(usage_message(error))
        raise typer.Exit(USAGE) from error
    except DFlashError as error:
        from .options import option_name

        message = str(error)
        if isinstance(error, SettingsError):
            message = re.sub(rf"\b({LONG_NAMES})\b", lambda match: option_name(match[0]), message)
        error_line(message)
        raise typer.Exit(USAGE if isinstance(error, WRONG_USAGE) else FAILED) from error
    except ValueError as error:
        import_error = error_of_import(error)
        if import_error is None:
            raise
        error_line(str(import_error))
        raise typer.Exit(FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # Typer exits quietly
            raise
        error_line(str(error) if error.filename else f"stdout: {error.strerror or error}.")
        # Discard what is buffered, or Python tries to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from error


def usage_message(error: Any) -> str:
    """Return what is wrong with the arguments, and where to read about them."""
    message = error.format_message()
    if getattr(error, "param", None) is not None:
        message = _parameter_message(error)
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        [closest] = get_close_matches(error.option_name, possibilities, n=1, cutoff=0)
        message = f"No such option: {error.option_name}. Did you mean {closest}?"
    if "unexpected extra argument" in message:
        if error.ctx.info_name == "chat":
            message += ": type it when the chat has begun"
        else:
            message += ": put quotes around a text of several words"
    if not message.endswith("?"):
        message = f"{message.removesuffix('.')}."
    if error.ctx:
        message += f" See '{error.ctx.command_path} --help'."
    return message


def _parameter_message(error: Any) -> str:
    """Return what is wrong with the value of one parameter, without the final dot."""
    parameter = error.param
    name = parameter.opts[0]
    if not name.startswith("-"):  # an argument
        name = (parameter.metavar or parameter.name).upper()
    if not error.message:
        return f"{name} is missing"
    if hasattr(error.__cause__, "errors"):
        details = error.__cause__.errors()[0]
        expected = EXPECTED.get(details["type"], "").format(**details.get("ctx", {}))
        if expected:
            return f"{name} must be {expected}, not {details['input']}"
    text = error.message.rstrip(".").replace("Value error, ", "")
    return f"{name}: {text}"
