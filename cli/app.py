"""The Typer application: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dflash_mlx import __version__
from dflash_mlx.errors import SettingsError
from dflash_mlx.machine.facts import installed

from .failures import one_line_errors

# Name -> the module of this package and its function, and two examples.
COMMANDS = {
    "generate": (
        "generate.generate",
        "'How many minutes are in 3 hours?' --compare",
        "Summarize -f notes.txt",
    ),
    "chat": ("chat.chat", "--model MODEL", "--server http://127.0.0.1:8000"),
    "serve": ("serve.serve", "--model MODEL", "--model MODEL --host 0.0.0.0 --api-key KEY"),
    "launch": ("launch.launch", "claude --model CODER", "codex --model CODER -- exec 'Say hi'"),
    "bench": ("bench.bench", "--limit 1", "--model MODEL --suite gsm8k --out results/gsm8k"),
    "tune": ("tune.tune", "", "--model MODEL"),
    "report": ("bench_report.report", "results/gsm8k", "results/my-mac results/another-mac"),
    "train": (
        "train.train",
        "--synthesize 32 --steps 8 --anchors 8 --out my-drafter",
        "--model MODEL --synthesize 2000 --hours 8 --out qwen3-4b",
    ),
    "models": ("models.models", "--memory 16 --chip M4", "Qwen3-8B"),
    "pull": ("downloads.pull", "MODEL", "MODEL --no-draft"),
    "list": ("downloads.list_", "", "--json"),
    "rm": ("downloads.rm", "MODEL", "z-lab/Qwen3-4B-DFlash-b16"),
    "doctor": ("doctor.doctor", "", "--model MODEL"),
}


class Commands(Mapping[str, Any]):
    """The commands by name. Each is imported on first use, so that `generate` starts quickly."""

    def __getitem__(self, name: str) -> Any:
        return _load_command(name, *COMMANDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


# Options with which other programs take the prompt that is an argument of `generate`.
PROMPT_OPTIONS = ("--prompt", "-p")
# Commands of other programs -> ours.
FOREIGN_COMMANDS = {"run": "chat --model NAME", "download": "pull NAME", "ls": "list"}


# Arguments that may be empty: `generate` says so itself, and an agent decides about its own.
FREE_TEXT = ("prompt", "arguments")


class CheckedCommand(TyperCommand):
    """A command that refuses options without effect or value.

    It accepts option names of other programs.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        from .options import ALIASES

        arguments: list[str] = []
        for arg in args:
            name, equals, value = arg.partition("=")
            if ctx.info_name == "generate" and name in PROMPT_OPTIONS:
                arguments += [value] if equals else []
            else:
                arguments.append(f"{ALIASES.get(name, name)}{equals}{value}")
        if not ctx.resilient_parsing:  # a shell completes a line
            self._refuse_empty_values(ctx, arguments)
        return super().parse_args(ctx, arguments)

    def _refuse_empty_values(self, ctx: Any, arguments: list[str]) -> None:
        """Raise `typer.BadParameter` for an empty value, such as a shell's unset variable.

        Otherwise an empty name would count as not given, and an empty path as the current folder.
        """
        values, _, _ = self.make_parser(ctx).parse_args(list(arguments))
        if values.get("help"):
            return
        parameters: list[Any] = self.params  # Typer's own types do not fit its own errors
        for parameter in parameters:
            value = values.get(parameter.name)
            is_empty = "" in value if isinstance(value, list | tuple) else value == ""
            if is_empty and parameter.name not in FREE_TEXT:
                raise typer.BadParameter("the value is empty", ctx=ctx, param=parameter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from .combinations import check_combinations

        check_combinations(ctx)
        return super().invoke(ctx)


@cache
def _load_command(name: str, path: str, *examples: str) -> Any:
    """Make a command of a function. `path` is its module and name; the examples end the help."""
    from .options import CODER, SMALL, expand_groups

    module, function = path.split(".")
    command = expand_groups(vars(import_module(f".{module}", __package__))[function])
    lines = [f"dflash-mlx {name} {example}".rstrip() for example in examples]
    epilog = "\n".join(("Examples:", *lines)).replace("MODEL", SMALL).replace("CODER", CODER)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=CheckedCommand, epilog=epilog)(command)
    return get_command(single)


class Program(TyperGroup):
    """The group of all commands. It turns errors into one line on stderr and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": Commands()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the first argument.

        Raises `SettingsError` for a command of another program, and names ours.
        """
        if args and args[0] in FOREIGN_COMMANDS:
            command = FOREIGN_COMMANDS[args[0]]
            raise SettingsError(f"There is no command {args[0]!r}: dflash-mlx {command}.")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the options before the command."""
        with one_line_errors():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        logging.disable(logging.WARNING)  # other libraries log warnings
        with one_line_errors():
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # a full disk must fail here, not at interpreter exit


app = typer.Typer(
    cls=Program,
    help="Speculative decoding on MLX: the same text as the model alone, in fewer passes.",
    epilog="Try: dflash-mlx generate 'How many minutes are in 3 hours?'",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        versions = [f"{name} {installed(name) or 'not installed'}" for name in ("mlx", "mlx-lm")]
        print(f"dflash-mlx {__version__} ({', '.join(versions)})")
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
