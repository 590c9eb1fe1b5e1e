"""`dflash-mlx doctor`: does everything that decoding needs work on this machine?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

import dflash_mlx
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED

from . import doctor_hosts, options
from .doctor_checks import Check, check_machine, check_model
from .machines import rank
from .output import print_json, stdout, waiting

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

HostsFile = Annotated[
    Path | None,
    options.option(
        options.MODEL, "FILE", "Check these machines and their link instead (mlx.launch's file)."
    ),
]
Model = Annotated[
    str | None,
    options.option(
        options.MODEL,
        "NAME",
        "Also load this model and check its weights; with --hosts, the model to share.",
        "--model",
        "-m",
    ),
]


def doctor(
    context: typer.Context,
    hosts: HostsFile = None,
    model: Model = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    json: options.Json = False,
) -> None:
    """Check that this machine has what decoding needs, and say how to fix what it lacks."""
    blas = dflash_mlx.use_fast_blas(stock=stock_blas)  # before any check imports MLX
    hub = Hub(offline=offline)
    if rank() is not None:
        doctor_hosts.measure(model or EMBEDDED, hub, context)
        return
    link = None
    if hosts is not None:
        checks, link = doctor_hosts.check_hosts(hosts, model or EMBEDDED, hub)
    else:
        with waiting("Checking"):
            checks = check_machine(blas, hub)
            if model is not None and all(check.status != "fail" for check in checks):
                checks.append(check_model(model, hub))
    _report(checks, json, link)


def _report(checks: Sequence[Check], json: bool, link: dict[str, Any] | None) -> None:
    """Print the checks, and exit with 1 if one failed."""
    failed = any(check.status == "fail" for check in checks)
    if json:
        content: dict[str, Any] = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        print_json(content | ({} if link is None else {"link": link}))
    else:
        table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))  # paths are long
        for check in checks:
            advice = (f"\n{check.advice}" * bool(check.advice), COLORS[check.status])
            status = Text(check.status, style=f"bold {COLORS[check.status]}")
            table.add_row(status, check.name, Text.assemble(check.detail, advice))
        stdout().print(table)
    if failed:
        raise typer.Exit(1)
