"""`dflash-mlx doctor`: does everything that decoding needs work on this machine?"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement
from rich.table import Column, Table
from rich.text import Text

import dflash_mlx
from dflash_mlx.cluster.hosts import read_hosts
from dflash_mlx.cluster.hosts_check import Check, check_hosts, take_part
from dflash_mlx.cluster.member import LOST, LOST_CODE, RankProcess, rank
from dflash_mlx.errors import ConfigError, DFlashError, how_to_install
from dflash_mlx.loading.hub import Hub, find
from dflash_mlx.loading.registry import EMBEDDED
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.chips import find_chip
from dflash_mlx.machine.facts import (
    DISTRIBUTION,
    GB,
    busy,
    bytes_in,
    cache_folder,
    computer,
    installed,
    nearest_there,
    usable_bytes,
)
from dflash_mlx.machine.fusion import fusion_may_round
from dflash_mlx.validation import brief, is_integer, text_config, user_path

from . import options
from .output import counted, note, print_json, sized, stdout, waiting

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
INSTALL = f"{how_to_install('mlx').capitalize()}."
REQUIRED = ("mlx", "mlx-lm")  # nothing works without these packages
LITTLE_DISK = 10  # GB below which most models do not fit
TOKENS = 16

LINK = "Check these machines and their link instead (mlx.launch's file)."
KERNELS = "On a Mac, check every Metal kernel in five minutes, and write what to send back."
WEIGHTS = "Also load this model and check its weights; with --hosts, the model to share."


def doctor(
    context: typer.Context,
    hosts: Path | None = options.option(None, options.MODEL, "FILE", LINK),
    model: str | None = options.model(None, WEIGHTS),
    kernels: bool = options.flag("--kernels", options.MODEL, KERNELS),
    offline: bool = options.OFFLINE,
    stock_blas: bool = options.STOCK_BLAS,
    json: bool = options.JSON,
) -> None:
    """Check that this machine has what decoding needs, and say how to fix what it lacks."""
    blas = dflash_mlx.use_fast_blas(stock=stock_blas)  # before any check imports MLX
    hub = Hub(offline=offline)
    if kernels:
        from .doctor_kernels import report

        if not report(model):
            raise typer.Exit(1)
        return
    if rank() is not None:
        _take_part(model or EMBEDDED, hub, context.find_object(RankProcess))
        return
    link = None
    if hosts is not None:
        shape, machines = _shape(model or EMBEDDED, hub), read_hosts(user_path(hosts))
        with waiting("Measuring the link"):
            checks, link = check_hosts(machines, model or EMBEDDED, shape)
    else:
        with waiting("Checking"):
            checks = check_machine(blas, hub)
            if model is not None and all(check.status != "fail" for check in checks):
                checks.append(check_model(model, hub))
    _report(checks, json, link)


def _take_part(model: str, hub: Hub, process: RankProcess | None) -> None:
    """Measure the link as one of the machines. Errors go to the one that asks, if one does."""
    try:
        line = take_part(process, _shape(model, hub))
    except DFlashError as error:
        if process is None:
            raise
        process.send(LOST, str(error))
        raise typer.Exit(LOST_CODE) from error
    if line is not None:
        note(line)


def _shape(model: str, hub: Hub) -> tuple[int, int]:
    """A model's hidden size and number of layers. Raises `ConfigError`."""
    folder = find(model, hub)
    config = text_config(folder.config)
    found: list[Any] = [config.get(name) for name in ("hidden_size", "num_hidden_layers")]
    if not all(map(is_integer, found)):
        raise ConfigError(f"{folder.path}: hidden_size must be 1 or more, not {brief(found[0])}.")
    return found[0], found[1]


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


def check_machine(blas: BlasInfo, hub: Hub) -> list[Check]:
    """All checks of this machine; those that need MLX only where it is installed."""
    checks = [_python(), _packages(), _disk(hub), _hub(hub)]
    if all(check.status != "fail" for check in checks):
        from dflash_mlx.loading.reading import on_cpu

        checks += [_chip(on_cpu()), *([_compiler(), _blas(blas)] if on_cpu() else []), _pair()]
    if warning := busy():
        checks.append(Check("load", "warn", warning, "Close other programs before you measure."))
    return checks


def check_model(name: str, hub: Hub) -> Check:
    """Load a target and look for weights that are NaN or infinite."""
    from dflash_mlx.loading.target_loader import damaged_weights

    try:
        damaged = damaged_weights(dflash_mlx.load_target(name, hub=hub).model)
    except DFlashError as error:
        return Check("model", "fail", str(error), "Or try another: see 'dflash-mlx models'.")
    if damaged:
        return Check("model", "fail", f"{name}: {damaged}", "Download it again.")
    return Check("model", "ok", f"{name}: loads, all weights are finite")


def _python() -> Check:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "fail", system, "MLX needs Apple silicon and a native Python.")
    return Check("Python", "ok", system)


def _packages() -> Check:
    """Installed versions against the supported ones; nothing works without MLX and mlx-lm."""
    try:
        wanted = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:  # a source tree that was not installed
        wanted = [Requirement("mlx"), Requirement("mlx-lm")]
    wrong = []
    for needed in wanted:
        if needed.marker is not None and not needed.marker.evaluate({"extra": "mlx"}):
            continue
        found = installed(needed.name)
        if found is None and needed.name in REQUIRED:
            return Check("packages", "fail", f"{needed.name} is not installed", INSTALL)
        if found is None or not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name} {found or 'not installed'}, needs {needed.specifier}")
    if wrong:
        return Check("packages", "warn", "; ".join(wrong), INSTALL)
    versions = ", ".join(f"{name} {installed(name)}" for name in REQUIRED)
    return Check("packages", "ok", f"{versions}; all versions are supported")


def _disk(hub: Hub) -> Check:
    """The room for downloads, and what this program keeps itself."""
    cache = cache_folder("")
    try:
        free = shutil.disk_usage(nearest_there(hub.folder)).free / GB
    except OSError as error:
        detail = f"{hub.folder}: {error.strerror}"
        return Check("disk", "warn", detail, "No model can be downloaded to there.")
    detail = f"{free:.0f} GB free in {hub.folder}; {sized(bytes_in(cache))} cached in {cache}"
    if free < LITTLE_DISK:
        return Check("disk", "warn", detail, "A model needs several GB: free some of the disk.")
    return Check("disk", "ok", detail)


def _hub(hub: Hub) -> Check:
    if hub.offline:
        return Check("hub", "ok", "not asked: --offline")
    try:
        seconds = hub.ping()
    except DFlashError as error:
        return Check("hub", "warn", str(error), "--offline uses what is downloaded.")
    return Check("hub", "ok", f"{hub.url} answers in {seconds:.1f} s")


def _chip(cpu: bool) -> Check:
    """The chip, and what decides whose kernels verify a block of rows on it."""
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown"))
    takes = f"{name}, models and caches may take {sized(usable_bytes())}"
    if cpu:
        cores = counted(int(computer()["cores"]), "core")
        return Check("chip", "ok", f"{name}, {cores}; MLX decodes on the CPU")
    if not mx.metal.is_available():
        return Check("chip", "warn", f"{takes}; MLX decodes on CUDA", "Use --no-draft for now.")
    if find_chip(name) is None:
        advice = "Please report this chip with its results of 'dflash-mlx bench'."
        return Check("chip", "warn", f"{name}: unknown to 'models'", advice)
    return Check("chip", "ok", f"{takes}; each model's first load times MLX's kernels and ours")


def _compiler() -> Check:
    """On Linux MLX compiles fused operations with g++ on first use."""
    path = shutil.which("g++")
    if path is None:
        return Check("g++", "warn", "not found", "MLX cannot fuse operations: install g++.")
    if fusion_may_round():
        return Check("g++", "ok", f"{path} may round fused operations, so MLX fuses none")
    return Check("g++", "ok", path)


def _blas(blas: BlasInfo) -> Check:
    detail = f"{blas.name}: {blas.reason}"
    if blas.name == "stock":
        return Check("BLAS", "warn", detail, "It is slow for several rows: drafting gains little.")
    if blas.name == "preloaded":
        return Check("BLAS", "warn", detail, "dflash-mlx's own is not used: leave out LD_PRELOAD.")
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
        return Check(name, "fail", "drafted text differs from plain text", "Please report this.")
    rate = drafted.stats.acceptance_length
    return Check(
        name, "ok", f"{len(plain.tokens)} tokens identical to plain, {rate:.1f} tokens per step"
    )
