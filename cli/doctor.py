"""`dflash-mlx doctor`: does all that decoding needs work on this machine?"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Literal

import typer
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

import dflash_mlx
from dflash_mlx.bench.machine import installed
from dflash_mlx.blas import BlasInfo
from dflash_mlx.errors import DFlashError

from . import options
from .screen import print_json, stdout, waiting

INSTALL = 'pip install -e ".[mlx]"'
TOKENS = 16
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def doctor(stock_blas: options.StockBlas = False, json: options.Json = False) -> None:
    """Check what decoding needs, and say what to do about what is missing."""
    blas = dflash_mlx.use_fast_blas(stock=stock_blas)  # before any check imports MLX
    checks = []
    with waiting("Looking"):
        checks += [_python(), *_packages()]
        if all(check.status != "fail" for check in checks):
            checks += [_device(), _compiler(), _blas(blas), _pair()]
    failed = any(check.status == "fail" for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        stdout().print(_table(checks))
    if failed:
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        what = Text(check.detail)
        if check.advice:
            what.append(f"\n{check.advice}", style=COLORS[check.status])
        table.add_row(Text(check.status, style=f"bold {COLORS[check.status]}"), check.name, what)
    return table


def _python() -> Check:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "fail", system, "MLX needs Apple silicon and a native Python.")
    return Check("Python", "ok", system)


def _packages() -> Iterator[Check]:
    """MLX and mlx-lm, against the versions this package was made for."""
    try:
        wanted = [Requirement(line) for line in requires("dflash-mlx") or ()]
    except PackageNotFoundError:  # run from a source tree that nobody installed
        wanted = [Requirement("mlx"), Requirement("mlx-lm")]
    for name in ("mlx", "mlx-lm"):
        needed = next(one for one in wanted if one.name == name and _applies(one))
        found = installed(name)
        if found is None:
            yield Check(name, "fail", "not installed", INSTALL)
        elif not needed.specifier.contains(found, prereleases=True):
            yield Check(name, "warn", f"{found}, made for {needed.specifier}", INSTALL)
        else:
            yield Check(name, "ok", found)


def _applies(requirement: Requirement) -> bool:
    """Whether it is for this Python and system: each has a range of its own."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": "mlx"})


def _device() -> Check:
    import mlx.core as mx

    if mx.metal.is_available():
        return Check("Metal", "ok", str(mx.device_info().get("device_name", "yes")))
    if sys.platform == "darwin":
        return Check("Metal", "warn", "not available", "MLX will decode on the CPU, slowly.")
    return Check("Metal", "ok", f"not on {platform.system()}: decoding on the CPU")


def _compiler() -> Check:
    """On Linux MLX compiles its fused operations with g++ when they are first used."""
    if sys.platform != "linux":
        return Check("g++", "ok", "not needed here")
    path = shutil.which("g++")
    if path is None:
        return Check("g++", "warn", "not found", "MLX cannot fuse operations: install g++.")
    return Check("g++", "ok", path)


def _blas(blas: BlasInfo) -> Check:
    detail = f"{blas.name}: {blas.reason}"
    if blas.name == "stock" and sys.platform == "linux":
        advice = "Drafting gains little on it: install libopenblas0 (or gcc, to use numpy's)."
        return Check("BLAS", "warn", detail, advice)
    return Check("BLAS", "ok", detail)


def _pair() -> Check:
    """The embedded pair writes a few tokens, plainly and drafted."""
    name, prompt = "embedded pair", [{"role": "user", "content": "Count from 1 to 9."}]
    try:
        target, drafter = dflash_mlx.load("tiny")
        plain = dflash_mlx.generate(target, None, prompt, max_tokens=TOKENS)
        drafted = dflash_mlx.generate(target, drafter, prompt, max_tokens=TOKENS)
    except DFlashError as error:
        return Check(name, "fail", str(error), "Install dflash-mlx again.")
    if plain.tokens != drafted.tokens:
        return Check(name, "fail", "the drafted text is not the plain one", "Please report this.")
    rate = drafted.stats.acceptance_length
    return Check(name, "ok", f"{len(plain.tokens)} tokens identical to plain, {rate:.1f} per round")
