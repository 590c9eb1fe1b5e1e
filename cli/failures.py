"""How an error becomes one line on stderr and an exit code."""

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

FAILED, USAGE = 1, 2
# Options that the library names in another way than the command line.
LONG_NAMES = "|".join(k for k, v in SETTINGS.items() if "_" in k and v.metavar)
WRONG_USAGE = (SettingsError, PromptError, UnsupportedTreeError)
UsageError: Any = typer.BadParameter.__base__  # of arguments; Typer exports no more of it
EXPECTED = {  # by the kind of a validation error of pydantic's
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
        from .options import spelled

        named = re.sub(rf"\b({LONG_NAMES})\b", lambda found: spelled(found[0]), str(error))
        error_line(named if isinstance(error, SettingsError) else str(error))
        raise typer.Exit(USAGE if isinstance(error, WRONG_USAGE) else FAILED) from error
    except ValueError as error:
        if (known := error_of_import(error)) is None:
            raise
        error_line(str(known))
        raise typer.Exit(FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # Typer exits quietly
            raise
        error_line(str(error) if error.filename else f"stdout: {error.strerror or error}.")
        # Discard what is buffered, or Python tries to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from error


def usage_message(error: Any) -> str:
    """What is wrong with the arguments, in words for people, and where they are explained."""
    parameter, cause = getattr(error, "param", None), error.__cause__
    message = error.format_message()
    if parameter is not None:
        named = parameter.opts[0].startswith("-")
        name = parameter.opts[0] if named else (parameter.metavar or parameter.name).upper()
        message = f"{name}: {error.message.rstrip('.')}" if error.message else f"{name} is missing"
        if hasattr(cause, "errors"):
            (found, *_) = cause.errors()
            expected = EXPECTED.get(found["type"], "").format(**found.get("ctx", {}))
            message = message.replace("Value error, ", "")
            message = f"{name} must be {expected}, not {found['input']}" if expected else message
    if possible := getattr(error, "possibilities", None):
        [closest] = get_close_matches(error.option_name, possible, n=1, cutoff=0)
        message = f"No such option: {error.option_name}. Did you mean {closest}?"
    if "unexpected extra argument" in message:
        chats = error.ctx.info_name == "chat"
        advice = "put quotes around a text of several words"
        message += f": {'type it when the chat has begun' if chats else advice}"
    help = f" See '{error.ctx.command_path} --help'." if error.ctx else ""
    return f"{message.removesuffix('.')}{'' if message.endswith('?') else '.'}{help}"
