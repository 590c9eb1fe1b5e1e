"""The Typer application: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dflash_mlx import __version__
from dflash_mlx.errors import DFlashError, PromptError, SettingsError, UnsupportedTreeError
from dflash_mlx.machine.facts import installed

from .option_groups import expand_groups
from .output import error_line

FAILED, USAGE = 1, 2
WRONG_USAGE = (SettingsError, PromptError, UnsupportedTreeError)
COMMANDS = {  # name -> the module beside this one and the function in it
    "generate": "generate.generate",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "launch": "launch.launch",
    "bench": "bench.bench",
    "tune": "tune.tune",
    "report": "report.report",
    "roofline": "roofline.roofline",
    "train": "train.train",
    "models": "models.models",
    "pull": "models.pull",
    "list": "models.list_",
    "rm": "models.rm",
    "doctor": "doctor.doctor",
}


class Commands(Mapping[str, Any]):
    """The commands by name. Each is imported on first use, so that `generate` starts quickly."""

    def __getitem__(self, name: str) -> Any:
        return _load_command(name, *COMMANDS[name].split("."))

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Command(TyperCommand):
    """A command that refuses options without effect."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from .combinations import check_combinations

        check_combinations(ctx)
        return super().invoke(ctx)


@cache
def _load_command(name: str, module: str, function: str) -> Any:
    """The command that Typer makes of a function."""
    single = typer.Typer(add_completion=False)
    made = expand_groups(vars(import_module(f".{module}", __package__))[function])
    single.command(name, cls=Command)(made)
    return get_command(single)


class Program(TyperGroup):
    """The group of all commands. It turns errors into one line on stderr and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": Commands()})

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        logging.disable(logging.WARNING)  # of other libraries
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # a full disk must fail here, not at interpreter exit
        except DFlashError as error:
            error_line(str(error))
            raise typer.Exit(USAGE if isinstance(error, WRONG_USAGE) else FAILED) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # Typer exits quietly
                raise
            error_line(str(error) if error.filename else f"stdout: {error.strerror or error}.")
            # Discard what is buffered, or Python tries to write it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from error


app = typer.Typer(
    cls=Program,
    help="Lossless speculative decoding on MLX: the same text, several times faster.",
    epilog="Try: dflash-mlx generate 'What is 47 plus 38?'",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        parts = (f"{name} {installed(name) or 'not installed'}" for name in ("mlx", "mlx-lm"))
        print(f"dflash-mlx {__version__} ({', '.join(parts)})")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options before any command."""
