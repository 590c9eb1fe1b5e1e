"""`dflash-mlx doctor`: checks that everything works on this machine that decoding needs."""

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
from dflash_mlx.validation import brief, is_integer, text_config, user_path

from . import options
from .output import counted, note, print_json, sized, stdout, waiting
from .pair import graph_reuse

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
INSTALL = f"{how_to_install('mlx').capitalize()}."
REQUIRED = ("mlx", "mlx-lm")  # nothing works without these packages
MIN_DISK_GB = 10  # most models do not fit into less
TOKENS = 16  # generated with the embedded pair

LINK = "Check these machines and their link instead (hosts file of mlx.launch)."
KERNELS = "On a Mac, check every Metal kernel in five minutes, and write what to send back."
WEIGHTS = "Also load this model and check its weights; with --hosts, the model to share."


def doctor(
    context: typer.Context,
    hosts: Path | None = options.option(None, panel=options.MODEL, metavar="FILE", help=LINK),
    model: str | None = options.model(None, WEIGHTS),
    kernels: bool = options.flag("--kernels", panel=options.MODEL, help=KERNELS),
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
        shape = _shape(model or EMBEDDED, hub)
        machines = read_hosts(user_path(hosts))
        with waiting("Measuring the link"):
            checks, link = check_hosts(machines, model or EMBEDDED, shape)
    else:
        with waiting("Checking"):
            checks = check_machine(blas, hub)
            if model is not None and all(check.status != "fail" for check in checks):
                checks.append(check_model(model, hub))
    _report(checks, json, link)


def _take_part(model: str, hub: Hub, process: RankProcess | None) -> None:
    """Measure the link as one of several machines. Errors go to the supervisor, if there is one."""
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
    """Return a model's hidden size and number of layers. Raises `ConfigError`."""
    folder = find(model, hub)
    config = text_config(folder.config)
    hidden_size: Any = config.get("hidden_size")
    layers: Any = config.get("num_hidden_layers")
    for name, value in (("hidden_size", hidden_size), ("num_hidden_layers", layers)):
        if not is_integer(value):
            raise ConfigError(f"{folder.path}: {name} must be 1 or more, not {brief(value)}.")
    return hidden_size, layers


def _report(checks: Sequence[Check], json: bool, link: dict[str, Any] | None) -> None:
    """Print the checks, and exit with 1 if one failed."""
    failed = any(check.status == "fail" for check in checks)
    if json:
        content: dict[str, Any] = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        if link is not None:
            content["link"] = link
        print_json(content)
    else:
        table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))  # paths are long
        for check in checks:
            color = COLORS[check.status]
            text = Text(check.detail)
            if check.advice:
                text.append(f"\n{check.advice}", style=color)
            table.add_row(Text(check.status, style=f"bold {color}"), check.name, text)
        stdout().print(table)
    if failed:
        raise typer.Exit(1)


def check_machine(blas: BlasInfo, hub: Hub) -> list[Check]:
    """Run all checks of this machine. Those that use MLX run only if the others pass."""
    checks = [_check_python(), _check_packages(), _check_disk(hub), _check_hub(hub)]
    if all(check.status != "fail" for check in checks):
        from dflash_mlx.loading.reading import on_cpu

        checks.append(_check_chip(on_cpu()))
        if on_cpu():
            checks += [_check_compiler(), _check_blas(blas)]
        checks.append(_check_pair())
    warning = busy()
    if warning:
        advice = "Close other programs before you measure."
        checks.append(_warning("load", warning, advice))
    return checks


def check_model(name: str, hub: Hub) -> Check:
    """Load a target and look for weights that are NaN or infinite."""
    from dflash_mlx.loading.target_loader import damaged_weights

    try:
        target = dflash_mlx.load_target(name, hub=hub)
        damaged = damaged_weights(target.model)
    except DFlashError as error:
        return _failure("model", str(error), "Or try another: see 'dflash-mlx models'.")
    if damaged:
        return _failure("model", f"{name}: {damaged}", "Download it again.")
    return _success("model", f"{name}: loads, all weights are finite; {graph_reuse(target)}")


def _success(name: str, detail: str) -> Check:
    return Check(name=name, status="ok", detail=detail)


def _warning(name: str, detail: str, advice: str) -> Check:
    return Check(name=name, status="warn", detail=detail, advice=advice)


def _failure(name: str, detail: str, advice: str) -> Check:
    return Check(name=name, status="fail", detail=detail, advice=advice)


def _check_python() -> Check:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return _failure("Python", system, "MLX needs Apple silicon and a native Python.")
    return _success("Python", system)


def _check_packages() -> Check:
    """Compare installed versions with the supported ones."""
    try:
        requirements = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:  # a source tree that was not installed
        requirements = [Requirement("mlx"), Requirement("mlx-lm")]
    problems = []
    for requirement in requirements:
        name = requirement.name
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "mlx"}):
            continue
        version = installed(name)
        if version is None and name in REQUIRED:
            return _failure("packages", f"{name} is not installed", INSTALL)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{name} {version or 'not installed'}, needs {requirement.specifier}")
    if problems:
        return _warning("packages", "; ".join(problems), INSTALL)
    versions = ", ".join(f"{name} {installed(name)}" for name in REQUIRED)
    return _success("packages", f"{versions}; all versions are supported")


def _check_disk(hub: Hub) -> Check:
    """Check the space for downloads, and show what dflash-mlx has cached."""
    cache = cache_folder("")
    try:
        free = shutil.disk_usage(nearest_there(hub.folder)).free / GB
    except OSError as error:
        detail = f"{hub.folder}: {error.strerror}"
        return _warning("disk", detail, "Models cannot be downloaded to this folder.")
    detail = f"{free:.0f} GB free in {hub.folder}; {sized(bytes_in(cache))} cached in {cache}"
    if free < MIN_DISK_GB:
        return _warning("disk", detail, "A model needs several GB: free some disk space.")
    return _success("disk", detail)


def _check_hub(hub: Hub) -> Check:
    if hub.offline:
        return _success("hub", "not asked: --offline")
    try:
        seconds = hub.ping()
    except DFlashError as error:
        return _warning("hub", str(error), "--offline uses what is downloaded.")
    return _success("hub", f"{hub.url} answers in {seconds:.1f} s")


def _check_chip(is_cpu: bool) -> Check:
    """Describe the chip, and where MLX decodes."""
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown"))
    memory = f"{name}, models and caches may take {sized(usable_bytes())}"
    if is_cpu:
        cores = counted(int(computer()["cores"]), "core")
        return _success("chip", f"{name}, {cores}; MLX decodes on the CPU")
    if not mx.metal.is_available():
        return _warning("chip", f"{memory}; MLX decodes on CUDA", "Use --no-draft for now.")
    if find_chip(name) is None:
        advice = "Please report this chip, with the results of 'dflash-mlx bench'."
        return _warning("chip", f"{name}: unknown to 'models'", advice)
    return _success("chip", f"{memory}; each model's first load times MLX's kernels and ours")


def _check_compiler() -> Check:
    """Look for g++, without which MLX on Linux keeps no graphs."""
    path = shutil.which("g++")
    if path is None:
        return _warning("g++", "not found", "MLX cannot keep the graph of a step: install g++.")
    return _success("g++", path)


def _check_blas(blas: BlasInfo) -> Check:
    detail = f"{blas.name}: {blas.reason}"
    if blas.name == "stock":
        advice = "It is slow for several rows, so drafting gains little."
        return _warning("BLAS", detail, advice)
    if blas.name == "preloaded":
        advice = "It replaces the BLAS of dflash-mlx: unset LD_PRELOAD."
        return _warning("BLAS", detail, advice)
    return _success("BLAS", detail)


def _check_pair() -> Check:
    """Generate a few tokens with the embedded pair, with and without drafting."""
    name = "embedded pair"
    prompt = [{"role": "user", "content": "Count from 1 to 9."}]
    try:
        target, drafter = dflash_mlx.load("tiny")
        plain = dflash_mlx.generate(target, None, prompt, max_tokens=TOKENS)
        drafted = dflash_mlx.generate(target, drafter, prompt, max_tokens=TOKENS)
    except DFlashError as error:
        return _failure(name, str(error), "Install dflash-mlx again.")
    if plain.tokens != drafted.tokens:
        return _failure(name, "drafted text differs from plain text", "Please report this.")
    rate = drafted.stats.acceptance_length
    tokens = len(plain.tokens)
    figures = f"{tokens} tokens identical to plain, {rate:.1f} tokens per step"
    return _success(name, f"{figures}; {graph_reuse(target)}")
