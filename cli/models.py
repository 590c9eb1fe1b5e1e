"""`dflash-mlx models`, `pull`, `list` and `rm`: known models, and those on this disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.checks import NO, WHETHER, YES, fits, looks_quantized
from dflash_mlx.loading.gguf.convert import content_name
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.inspect import inspect_drafter
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import (
    EMBEDDED,
    OTHERWISE,
    PACKAGED,
    PACKAGES,
    KnownPair,
    known_drafter,
    local_path,
    packaged,
    pairs,
    suggestion,
)
from dflash_mlx.machine.facts import GB, bytes_in, cache_folder

from . import options
from .options import MODEL, OUTPUT, argument, flag, option
from .output import NOTHING, make_table, note, print_json, sized, stdout
from .pair import announce, on_hub
from .roofline import PREDICTED, show_models

WIDTHS = (16, 8, 4)  # bits per weight
FAMILY = re.compile(r"[a-z]*[\d.]*")

REPOSITORY = "A Hugging Face repository (owner/name, for GGUF files owner/name:TYPE)."
CHIP = "Predict which models fit a Mac, and their speeds: M1 to M5 Max. Default: this chip."
MEMORY = "The memory of that Mac. Default: what this machine may use."
NAME = argument(..., REPOSITORY, autocompletion=options.targets_beginning)


def models(
    name: str = argument("", "Show these models and their drafters.", metavar="NAME"),
    everything: bool = flag("--all", OUTPUT, "Show those that do not fit, too."),
    chip: str | None = option(None, PREDICTED, "NAME", CHIP),
    memory: int | None = option(None, PREDICTED, "GB", MEMORY, min=1),
    json: bool = options.JSON,
    inspect: Path | None = option(
        None, OUTPUT, "PATH", "Show how a drafter's config.json is read."
    ),
) -> None:
    """List the models that have a known drafter, those that fit this machine first."""
    if inspect is not None:
        _inspect(inspect, json)
        return
    if chip is not None or memory is not None:
        show_models(name, chip, memory, json)
        return
    hub, known = Hub(), name.lower()
    copies = hub.copies()
    named = [one for one in pairs() if known in str(one.targets).lower() or one.matches(name)]
    if name in PACKAGED and not json:
        whence = "'make real' installs it" if name in PACKAGES else "it is built in"
        note(f"{name} comes with its drafter: {whence}.")
        return
    if not named and name not in PACKAGED:
        raise ModelNotFoundError(
            f"No model {name!r} has a known drafter.{suggestion(name)} A model drafts without one, "
            "too: with its MTP head, from its own text, or with a smaller model (--draft NAME)."
        )
    if json:
        rows = [_as_json(pair, copies) for pair in named]
        print_json({"embedded": EMBEDDED, "pairs": rows})
        return
    shown = [pair for pair in named if everything or name or _fits(pair) not in (None, NO)]
    _print_models(sorted(shown, key=_order), copies, [hub] if name else None)
    if len(shown) < len(named):
        note(f"{len(named) - len(shown)} more do not fit or have no known size: --all.")
    note("GB: from parameters. Conversions are known by name, such as Qwen3-8B-4bit.")
    note("'dflash-mlx models NAME' shows files and drafters; --draft chooses one.")


def pull(
    *,
    name: str = NAME,
    no_draft: bool = flag("--no-draft", MODEL, "Do not download the drafter."),
    offline: bool = options.OFFLINE,
) -> None:
    """Download a model and its known drafter, and print where they are."""
    local_path(name)  # raises for a wrong name
    if not on_hub(name):
        note(f"{name} is on this disk already.")
        return
    drafter, hub = known_drafter(name), Hub(offline=offline)
    from dflash_mlx.loading.load import find_drafter, find_target  # starts MLX

    _, model = find_target(name, hub, Quantization(4, 64))  # --target-bits 4 may follow
    announce(name, hub)
    names = [name]
    if drafter is None and not no_draft:
        note(f"No drafter is known for {name}: --draft NAME names one. {OTHERWISE}")
    elif drafter is not None and on_hub(drafter) and not no_draft:
        names.append(drafter)
        find_drafter(drafter, hub, model)
        announce(drafter, hub, drafter=True)
    for one in names:
        print(f"{one}  {hub.fetch(one, update=True).path}", flush=True)


def list_(*, json: bool = options.JSON) -> None:
    """List the downloaded models with their sizes."""
    copies = Hub().copies()
    fit = {name: fits(size, looks_quantized(name)) for name, size in copies.items()}
    if json:
        rows = [{"name": name, "bytes": copies[name], "fits": fit[name]} for name in copies]
        print_json({"models": rows})
        return
    if not copies:
        note("Nothing is downloaded from the hub. 'dflash-mlx pull NAME' downloads.")
        note(f"'tiny' is built in; what pip installed is unpacked in {cache_folder('gguf')}.")
        return
    table = make_table("name", "size", WHETHER)
    for name, size in copies.items():
        table.add_row(name, sized(size), fit[name])
    stdout().print(table)


def _downloaded(incomplete: str) -> list[str]:
    """The downloaded models that a shell may complete a name to."""
    return [name for name in Hub().copies() if name.startswith(incomplete)]


def rm(*, name: str = argument(..., REPOSITORY, autocompletion=_downloaded)) -> None:
    """Delete a downloaded model from this disk."""
    if name == EMBEDDED:
        raise ModelNotFoundError(f"{name} is part of dflash-mlx and cannot be deleted.")
    if name in PACKAGES:
        package, folder = PACKAGES[name][0], cache_folder("gguf")
        unpacked = [*folder.glob(f"{content_name(packaged(name))}*")]
        freed = sum(map(bytes_in, unpacked))
        for one in filter(Path.is_dir, unpacked):
            shutil.rmtree(one)
        note(f"Deleted what {name} unpacked: {sized(freed)} freed. pip uninstall {package}")
        return
    note(f"Deleted {name}: {sized(Hub().remove(name))} freed.")


def _order(pair: KnownPair) -> tuple[bool, str, float]:
    """Those that fit first; then by family and size."""
    family = FAMILY.match(pair.targets[0].rpartition("/")[2].lower())
    return _fits(pair) in (None, NO), family[0] if family else "", pair.billions or 0


def _print_models(shown: list[KnownPair], copies: dict[str, int], asked: list[Hub] | None) -> None:
    """A line for each target: its sizes, whether it fits, and what of it is downloaded."""
    names = [pair.targets[0] if asked else Path(pair.targets[0]).name for pair in shown]
    width = max(map(len, ("GB of memory", *names)))

    def row(name: str, cells: Iterable[str], status: str, style: str = "") -> None:
        line = f"{name:{width}}{''.join(f'{cell:>7}' for cell in cells)}  {status}"
        stdout().print(Text(line, style), soft_wrap=True)

    row("GB of memory", (f"{bits}-bit" for bits in WIDTHS), WHETHER, "bold")
    if asked is None:
        for name, origin in (EMBEDDED, "built in"), ("smollm2", "installed by make real"):
            row(name, ("", "", NOTHING), f"{YES}, {origin}")
    for pair, name in zip(shown, names, strict=True):
        sizes = map(pair.gigabytes, WIDTHS)
        own = [size for copy, size in copies.items() if pair.matches(copy)]
        here = f", downloaded {sized(sum(own))}" * bool(own)
        status = f"{pair.unsupported or _fits(pair) or NOTHING}{here}"
        row(name, (NOTHING if one is None else f"{one:.1f}" for one in sizes), status)
        for line in _details(pair, copies, asked) if asked is not None else ():
            stdout().print(Text(f"  {line}", "dim"), soft_wrap=True)


def _details(pair: KnownPair, copies: dict[str, int], hubs: list[Hub]) -> Iterator[str]:
    """What to download, other names, the drafters, and what is here."""
    drafters = [one for one in pair.drafters if one.refused is None]
    sizes = dict[str, str]()
    try:
        for name in (pair.download, *(one.drafter for one in drafters[:1])) if hubs else ():
            with suppress(ModelNotFoundError):
                sizes[name] = f", {sized(copies.get(name) or hubs[0].remote_bytes(name))}"
    except DownloadError:  # without the hub, without sizes: it is asked no more
        hubs.clear()
    yield f"download {pair.download}{sizes.get(pair.download, '')}"
    yield from (f"also {name}" for name in pair.targets[1:])
    for at, one in enumerate(drafters):
        license = f" (license: {one.license})" * bool(one.license)
        yield f"{'or' if at else 'drafter'} {one.drafter}{sizes.get(one.drafter, '')}{license}"
    for name, size in copies.items():
        if pair.matches(name) or name in {one.drafter for one in drafters}:
            yield f"downloaded: {name}, {sized(size)}"


def _fits(pair: KnownPair) -> str | None:
    """Whether the published weights fit this machine; None if their size is unknown."""
    if pair.unsupported:
        return NO
    size = pair.gigabytes(16)
    return None if size is None else fits(size * GB, quantized=pair.published is not None)


def _as_json(pair: KnownPair, copies: dict[str, int]) -> dict[str, Any]:
    drafter, *others = pair.drafters
    return {
        "drafter": drafter.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in others],
        "download": pair.download,
        "gigabytes": {str(bits): pair.gigabytes(bits) for bits in WIDTHS},
        "fits": _fits(pair),
        "unsupported": pair.unsupported,
        "license": drafter.license,
        "downloaded": {name: size for name, size in copies.items() if pair.matches(name)},
        "drafter_bytes": copies.get(drafter.drafter),
    }


def _inspect(path: Path, json: bool) -> None:
    """Print what each field of a drafter's config was resolved to, and from where."""
    if not path.exists():
        from dflash_mlx.loading.load import drafter_folder

        try:
            path = drafter_folder(str(path), Hub(offline=True)).path
        except DownloadError as error:
            raise ModelNotFoundError(f"{path} is not here: dflash-mlx pull {path}") from error
    decisions = inspect_drafter(path)
    if json:
        print_json({"path": str(path), "decisions": [asdict(decision) for decision in decisions]})
        return
    table = Table.grid(padding=(0, 2))
    for decision in decisions:
        table.add_row(Text(decision.field, "bold"), str(decision.value), decision.source)
    stdout().print(table)
