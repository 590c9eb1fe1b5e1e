"""`dflash-mlx roofline --machines`: what sharing a model costs, and what drafting gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, NONE, check_name, pair_of
from dflash_mlx.machine.links import Link, link_named, links

from .output import counted, note, print_json, sized, stdout, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.machines import Shard, SharedRound
    from dflash_mlx.kernels.shapes import Matrix
    from dflash_mlx.loading.quantization import Quantization
    from dflash_mlx.machine.chips import Chip

WIDE = 70  # columns of the whole tables


@dataclass(frozen=True)
class Asked:
    """What a prediction is about.

    Attributes:
        model: its name.
        config, file: its config.json, and where that is.
        quantization: that is made on loading.
        chip: where it runs.
        tokens: of a round of 16 rows.
        context: tokens to attend to.
    """

    model: str
    config: dict[str, Any]
    file: Path
    quantization: Quantization | None
    chip: Chip
    tokens: float
    context: int


def over_machines(
    asked: Asked, machines: int, link_name: str, draft: str | None, hub: Hub, json: bool
) -> None:
    """Predict rounds over so many machines, and what drafting gains on each kind of link.

    Raises `SettingsError` for a link that is not known and for a model that cannot be split so.
    """
    link = link_named(link_name)
    with waiting("Reading the model's shapes"):
        from dflash_mlx.bench.machines import fastest, shard_of, shared_rounds
        from dflash_mlx.bench.roofline import model_of

        def shard(count: int) -> Shard:
            model = model_of(asked.config, asked.file, asked.quantization)
            return shard_of(model, asked.config, asked.context, count, asked.model)

        alone, shared = shard(1), shard(machines)
        name, drafter = _drafter(asked.model, draft, alone, hub)

    def predicted(part: Shard, over: Link) -> list[SharedRound]:
        return shared_rounds(part, drafter, asked.chip, over, asked.tokens)

    rows = predicted(shared, link)
    gains = [_gain("one machine", None, alone, predicted(alone, link))]
    gains += [_gain(one.name, one, shared, predicted(shared, one)) for one in links()]
    if json:
        content: dict[str, Any] = {"prediction": True, "model": asked.model, "machines": machines}
        content |= {"chip": asdict(asked.chip), "link": asdict(link), "drafter": name}
        content |= {"acceptance": asked.tokens, "context": asked.context}
        content["weights_bytes"] = shared.shapes.weights
        content["exchanges"] = [
            one._asdict() | {"count": count} for one, count in shared.exchanges.items()
        ]
        content["recommended_rows"] = fastest(rows).rows
        print_json(content | {"rounds": [asdict(row) for row in rows], "links": gains})
        return
    stdout().print(_rounds(rows))
    stdout().print(_links(gains, link))
    _notes(asked, shared, link, name, fastest(rows))


def _gain(
    name: str, link: Link | None, part: Shard, rounds: Sequence[SharedRound]
) -> dict[str, Any]:
    """What drafting does there."""
    from dflash_mlx.bench.machines import fastest

    best, plain = fastest(rounds), rounds[0]
    return {
        "link": name,
        "waiting_ms": 0.0 if link is None else 1e3 * part.waiting(1, link),
        "plain_tokens_per_second": plain.tokens_per_second,
        "rows": best.rows,
        "drafted_tokens_per_second": best.tokens_per_second,
        "speedup": best.speedup,
    }


def _drafter(
    model: str, asked: str | None, alone: Shard, hub: Hub
) -> tuple[str | None, list[Matrix]]:
    """The drafter's name and its matrices; None and none of them where its config is not known.

    Raises the errors of `Hub.config` and `DraftConfig.from_file` for one that was asked for.
    """
    from dflash_mlx.bench.machines import drafter_matrices
    from dflash_mlx.drafter.config import DraftConfig

    pair = pair_of(model)
    name = asked or (EMBEDDED if model == EMBEDDED else pair.drafter if pair else None)
    if name is None or name in (LOOKUP, NONE):
        return name, []
    try:
        folder = config_folder(name, "drafter", hub)
    except (DownloadError, ModelNotFoundError):
        if asked is not None:
            raise
        return None, []
    return name, drafter_matrices(DraftConfig.from_file(folder / "config.json"), alone.head)


def config_folder(name: str, part: str, hub: Hub) -> Path:
    """The folder with the config.json of a "target" or "drafter" that may not be downloaded.

    Raises `SettingsError` for what cannot be a name, and the errors of `Hub.config`.
    """
    if name == EMBEDDED:
        return Path(str(files("dflash_mlx.tiny"))) / part
    check_name(name)
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else hub.config(name)


def _notes(asked: Asked, shared: Shard, link: Link, drafter: str | None, best: SharedRound) -> None:
    """What the tables mean, and what they leave out."""
    speed = f"at most {best.tokens_per_second:,.0f} tokens per second"
    note(f"Recommended: {counted(best.rows, 'row')}, {speed}, {best.speedup:.1f}x plain decoding.")
    sums = sum(n for one, n in shared.exchanges.items() if not one.gathers)
    gathers = shared.exchanges.total() - sums
    told = f"{sums} sums" + (f", {counted(gathers, 'gather')}" if gathers else "")
    note(f"Each machine reads {sized(shared.shapes.weights)}; a forward has {told} and a message.")
    where = f"{shared.machines} x {asked.chip.name}, {link.title}"
    note(f"A prediction, not a measurement: {asked.model} on {where},")
    note(f"{asked.context} tokens of context, {asked.tokens:g} tokens a round of 16 rows.")
    if drafter is None:
        note("The drafter's own time is not in it: --draft names it.")
    note(
        f"The link: {link.step * 1e6:.0f} us a step, {link.bandwidth / 1e9:g} GB/s. {link.source}."
    )


def _rounds(rows: Sequence[SharedRound]) -> Table:
    """A row for each width."""
    titles = ["rows", "tokens", "compute ms", "link ms", "draft ms", "x plain", "tok/s"]
    best = max(row.speedup for row in rows)
    lines = []
    for row in rows:
        style = "[bold green]" if row.speedup == best else ""
        cells = [f"{row.rows}", f"{row.tokens:.2f}", f"{row.compute_ms:.2f}", f"{row.link_ms:.2f}"]
        cells += [f"{row.draft_ms:.2f}", f"{style}{row.speedup:.2f}x"]
        lines.append([*cells, f"{row.tokens_per_second:,.0f}"])
    return _table(titles, lines, (0, 3, 5, 6))


def _links(gains: Sequence[dict[str, Any]], link: Link) -> Table:
    """A row for each kind of link: the longer a forward waits, the more drafting gains."""
    titles = ["between them", "link ms", "plain", "drafted", "rows", "gain"]
    lines = []
    for one in gains:
        style = "[bold]" if one["link"] == link.name else ""
        cells = [f"{style}{one['link']}", f"{one['waiting_ms']:.2f}"]
        cells += [f"{one[f'{way}_tokens_per_second']:,.0f} tok/s" for way in ("plain", "drafted")]
        lines.append([*cells, f"{one['rows']}", f"{style}{one['speedup']:.2f}x"])
    return _table(titles, lines, (0, 1, 5))


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], most: Sequence[int]) -> Table:
    """A narrow terminal gets the columns that matter most."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    kept = range(len(titles)) if stdout().width >= WIDE else most
    for place in kept:
        name = titles[place] == "between them"
        table.add_column(titles[place], justify="left" if name else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[place] for place in kept))
    return table
