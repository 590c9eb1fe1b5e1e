"""`dflash-mlx doctor`: does all that decoding needs work on this machine?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement

import dflash_mlx
from dflash_mlx.errors import DFlashError, how_to_install
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.chips import find_chip
from dflash_mlx.machine.facts import GB, computer, installed, memory_bytes
from dflash_mlx.machine.folders import bytes_in, cache_folder, nearest_there

from . import doctor_hosts, options
from .doctor_checks import Check, table
from .machines import rank
from .output import print_json, sized, stdout, waiting

INSTALL = f"{how_to_install('mlx').capitalize()}."
REPORT = "Please report this chip with what 'dflash-mlx bench' says about it."
DECODING = ("mlx", "mlx-lm")  # the packages that nothing works without
LITTLE_MEMORY, LITTLE_DISK = 8, 10  # GB below which most models do not fit
TOKENS = 16


def doctor(
    context: typer.Context,
    hosts: Annotated[
        Path | None,
        options.value(
            group=options.MODEL,
            metavar="FILE",
            help="Check these machines and their links instead: mlx.launch's file.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        options.value(
            "--model",
            "-m",
            group=options.MODEL,
            metavar="NAME",
            help="Load this model and look at every weight; with --hosts, what they share.",
        ),
    ] = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    json: options.Json = False,
) -> None:
    """Check that this machine has what decoding needs, and say how to fix what it lacks."""
    if hosts is not None and rank() is not None:
        raise typer.BadParameter("goes without mlx.launch", param_hint="--hosts")
    blas = dflash_mlx.use_fast_blas(stock=stock_blas)  # before any check imports MLX
    if hosts is not None or rank() is not None:
        looked = doctor_hosts.look(hosts, model or EMBEDDED, Hub(offline=offline), context)
        if looked is not None:
            _say(looked.checks, json, looked.measured)
        return
    checks = []
    with waiting("Looking"):
        checks += [_python(), *_packages(), _memory(), _disk(), _cache(), _hub(offline)]
        if all(check.status != "fail" for check in checks):
            checks += [_chip(), _metal(), _kernels(), _compiler(), _blas(blas), _pair()]
            if model is not None:
                checks.append(_model(model, Hub(offline=offline)))
    _say(checks, json)


def _say(checks: Sequence[Check], json: bool, measured: dict[str, Any] | None = None) -> None:
    """The report, and the exit code that goes with it."""
    failed = any(check.status == "fail" for check in checks)
    if json:
        content: dict[str, Any] = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        print_json(content | ({} if measured is None else {"link": measured}))
    else:
        stdout().print(table(checks))
    if failed:
        raise typer.Exit(1)


def _python() -> Check:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "fail", system, "MLX needs Apple silicon and a native Python.")
    return Check("Python", "ok", system)


def _packages() -> Iterator[Check]:
    """MLX and mlx-lm, then all others, against the versions this package was made for."""
    try:
        wanted = [Requirement(line) for line in requires("dflash-mlx") or ()]
    except PackageNotFoundError:  # run from a source tree that nobody installed
        wanted = [Requirement("mlx"), Requirement("mlx-lm")]
    others = []
    for needed in filter(_applies, wanted):
        found = installed(needed.name)
        fits = found is not None and needed.specifier.contains(found, prereleases=True)
        detail = f"{found or 'not installed'}, made for {needed.specifier}"
        if needed.name not in DECODING:
            others.append(Check(needed.name, "ok" if fits else "warn", f"{needed.name} {detail}"))
        elif found is None:
            yield Check(needed.name, "fail", "not installed", INSTALL)
        elif not fits:
            yield Check(needed.name, "warn", detail, INSTALL)
        else:
            yield Check(needed.name, "ok", found)
    wrong = [other.detail for other in others if other.status != "ok"]
    if wrong:
        yield Check("packages", "warn", "; ".join(wrong), INSTALL)
    else:
        yield Check("packages", "ok", f"{len(others)} others, all in range")


def _applies(requirement: Requirement) -> bool:
    """Whether it is for this Python and system: each has a range of its own."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": "mlx"})


def _memory() -> Check:
    size = memory_bytes() / GB
    detail = f"{size:.0f} GB"
    if size < LITTLE_MEMORY:
        advice = "Enough for small models in 4 bits: see 'dflash-mlx models' for their sizes."
        return Check("memory", "warn", detail, advice)
    return Check("memory", "ok", detail)


def _disk() -> Check:
    """The room where downloads go."""
    folder = Hub().folder
    existing = nearest_there(folder)
    free = shutil.disk_usage(existing).free / GB
    detail = f"{free:.0f} GB free for downloads in {folder}"
    if free < LITTLE_DISK:
        return Check("disk", "warn", detail, "A model needs several GB: free some of the disk.")
    if not os.access(existing, os.W_OK):
        return Check("disk", "warn", f"{existing} cannot be written", "Set its permissions.")
    return Check("disk", "ok", detail)


def _cache() -> Check:
    """What this program keeps beside downloads."""
    folder = cache_folder("")
    what = "unpacked GGUF files, measurements, what was typed in chats"
    return Check("cache", "ok", f"{sized(bytes_in(folder))} in {folder}: {what}")


def _hub(offline: bool) -> Check:
    if offline:
        return Check("hub", "ok", "not asked: --offline")
    hub = Hub()
    try:
        seconds = hub.ping()
    except DFlashError as error:
        advice = "The embedded pair and what is downloaded work without it; see --offline."
        return Check("hub", "warn", str(error), advice)
    return Check("hub", "ok", f"{hub.url} answers in {seconds:.1f} s")


def _chip() -> Check:
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown"))
    return Check("chip", "ok", f"{name}, cores to use: {computer()['cores']}")


def _metal() -> Check:
    import mlx.core as mx

    if mx.metal.is_available():
        return Check("Metal", "ok", "available")
    if sys.platform == "darwin":
        return Check("Metal", "warn", "not available", "MLX will decode on the CPU, slowly.")
    return Check("Metal", "ok", f"not on {platform.system()}: decoding on the CPU")


def _kernels() -> Check:
    """Whose kernels verify a block of rows, and why; see `kernels.choose`."""
    import mlx.core as mx

    from dflash_mlx.kernels.choose import GENERATIONS, choices, read_timings, summary

    if not mx.metal.is_available():
        return Check("kernels", "ok", "MLX's own; ours need Metal")
    chip = find_chip(str(mx.device_info().get("device_name", "")))
    measured = choices(read_timings())
    timed = ""
    if measured:
        won = sum(first is not None for first in measured.values())
        timed = f"; of {len(measured)} shapes timed by 'tune' ours run {won}"
    if chip is None:
        return Check("kernels", "warn", f"MLX's own: this chip is not known{timed}", REPORT)
    if chip.generation not in GENERATIONS:
        return Check("kernels", "ok", f"MLX's own, which are better on {chip.name}{timed}")
    return Check("kernels", "ok", f"ours on {chip.name} for {summary(chip)}{timed}")


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


def _model(name: str, hub: Hub) -> Check:
    """Load a target and look for weights that are NaN or infinite."""
    from dflash_mlx.loading.checkpoint import damaged_weights

    try:
        damaged = damaged_weights(dflash_mlx.load_target(name, hub=hub).model)
    except DFlashError as error:
        return Check("model", "fail", str(error), "Or try another: see 'dflash-mlx models'.")
    if damaged:
        detail = f"{name}: NaN or infinite weights in {damaged[0]}, {len(damaged)} tensors in all"
        return Check("model", "fail", detail, "Download it again.")
    return Check("model", "ok", f"{name}: loads, all weights are finite")
