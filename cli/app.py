"""The Typer application: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dflash_mlx import __version__
from dflash_mlx.errors import DFlashError, PromptError, SettingsError, UnsupportedTreeError
from dflash_mlx.machine.facts import installed

from .garbage import nothing_collected
from .screen import LIKE, error_line
from .spread import spread

FAILED, USAGE = 1, 2
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal's number, as a shell reports it
# What was asked for is wrong, as it may be before any library is asked; all else is what was found.
WRONG_OPTION: Any = typer.BadParameter.__base__  # click's UsageError, of the click that Typer has
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
    "pull": "downloads.pull",
    "list": "downloads.list_",
    "rm": "downloads.rm",
    "doctor": "doctor.doctor",
}

ELSEWHERE = {  # what other programs call it
    "run": "chat --model NAME",
    "prompt": "generate TEXT",
    "complete": "generate TEXT",
    "show": "models",
    "ls": "list",
    "version": "--version",
    "completion": "--show-completion",
}


class Flags:
    """A command whose flags are shown without a value: Typer puts <bool> behind some."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The arguments and options, --help too."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(Flags, TyperCommand):
    """One of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words that are too many are told what they were likely meant for."""
        ctx.allow_extra_args = True
        with self._plainly(ctx):
            extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            ctx.fail(self._too_many(ctx, extra))
        return extra

    def _too_many(self, ctx: Any, extra: list[str]) -> str:
        """Of a text whose quotes were forgotten, or a model's name where only options are."""
        words = " ".join(extra)
        if arguments := self._arguments():
            text = shlex.quote(f"{ctx.params[arguments[-1]]} {words}")
            return f"One {arguments[-1]} at a time. Text with spaces needs quotes: {text}"
        told = f"'{self.name}' takes options alone, and '{words}' is none."
        if any(p.name == "model" for p in self.params) and len(words.split()) == 1:
            told += f" If it is a model: {ctx.command_path} --model {shlex.quote(words)}"
        return told

    def _arguments(self) -> list[str]:
        """Names of what needs no option."""
        return [str(p.name) for p in self.params if p.param_type_name == "argument"]

    @contextmanager
    def _plainly(self, ctx: Any) -> Iterator[None]:
        """Leave out whose words a mistake is told in; a beginning stands for the options it has."""
        try:
            yield
        except WRONG_OPTION as error:
            error.message = error.message.removeprefix("Value error, ")
            wrong = getattr(error, "option_name", None)
            if wrong is not None and getattr(error, "possibilities", None) is not None:
                names = [name for one in self.get_params(ctx) for name in one.opts]
                begun = [name for name in names if name.startswith(wrong)]
                error.possibilities = begun or get_close_matches(wrong, names, cutoff=LIKE)
            if wrong in ("-p", "--prompt") and "prompt" in self._arguments():
                error.message += f". A prompt needs none: {ctx.command_path} TEXT"
                error.possibilities = None
            raise


class Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is asked for: an answer waits for one alone."""

    def __getitem__(self, name: str) -> Any:
        return _declared(name, *COMMANDS[name].split("."))

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _declared(name: str, module: str, function: str) -> Any:
    """The command that Typer makes of a function."""
    alone = typer.Typer(add_completion=False)
    with nothing_collected():
        command = spread(vars(import_module(f".{module}", __package__))[function])
        alone.command(name, cls=Command)(command)
        return get_command(alone)


class Program(Flags, TyperGroup):
    """Every command runs inside this: the errors of the library end here."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": Commands()})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`help` and a command's name is that command and --help."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        with _told():  # here --help and --version write
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command; a word that is none is told what was likely meant."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            ctx.fail(_no_command(args[0]))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        # Other libraries' advice is not for the person at the terminal.
        logging.disable(logging.WARNING)
        with _told(), self._as_options(ctx):
            return super().invoke(ctx)

    @contextmanager
    def _as_options(self, ctx: Any) -> Iterator[None]:
        """What the library says of its arguments is told of the options that they are here."""
        try:
            yield
        except SettingsError as error:
            told = str(error)
            for param in self.commands[ctx.invoked_subcommand].params:
                if param.param_type_name == "option" and param.name:
                    # A name without a line in it is a word like others, but where a message begins.
                    begins = r"(?<![\w.-])" if "_" in param.name else "^"
                    word = rf"{begins}{param.name}(?![\w.]*\w)"
                    told = re.sub(word, max(param.opts, key=len), told)
            raise SettingsError(told) from error


def _no_command(word: str) -> str:
    """What to say of a first word that is no command: a habit, a prompt, a model or a slip."""
    from dflash_mlx.loading.registry import EMBEDDED, PACKAGES

    if len(word.split()) > 1:
        return f"A text stands behind a command: dflash-mlx generate {shlex.quote(word)}"
    if word in (EMBEDDED, *PACKAGES) or "/" in word:
        return f"A model stands behind a command: dflash-mlx chat --model {shlex.quote(word)}"
    near = get_close_matches(word, COMMANDS, n=1, cutoff=LIKE)
    meant = ELSEWHERE.get(word) or next(iter(near), None)
    hint = f"Did you mean '{meant}'?" if meant else "dflash-mlx -h lists them."
    return f"No such command '{word}'. {hint}"


@contextmanager
def _told() -> Iterator[None]:
    """A context whose errors become a line on stderr and an exit code."""
    try:
        try:
            yield
        finally:
            # What is left in the buffer must fail here, not at the interpreter's shutdown.
            sys.stdout.flush()
    except DFlashError as error:
        error_line(str(error))
        raise typer.Exit(USAGE if isinstance(error, WRONG_USAGE) else FAILED) from error
    except KeyboardInterrupt as error:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt goes below the half-written line
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # Whoever read our output has seen enough: stop without a word, as other tools do.
        _forget_output()
        raise typer.Exit(PIPE_CLOSED) from error
    except OSError as error:  # a full disk, a folder without permission
        # What fails to be written elsewhere is an `OutputError`, or names its file.
        error_line(str(error) if error.filename else f"stdout: {error.strerror or error}.")
        _forget_output()
        raise typer.Exit(FAILED) from error


def _forget_output() -> None:
    """Send what is still buffered nowhere, or Python would try to write it again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


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
            "--version",
            metavar="",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Options before any command."""
