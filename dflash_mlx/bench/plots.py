"""A run as pictures: speedups, tokens kept per round, speed over the length of the context."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError
from .summary import PLAIN, drafting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLORS = {
    "plain": "#777777",
    "DDTree": "#009E73",
    "mlx-lm": "#E69F00",
    "server": "#CC79A7",
}
ON_TRIAL = "#0072B2"  # what drafts chains, whatever it is called
SPEEDUP, ACCEPTED, CONTEXT = "speedup.png", "acceptance.png", "context.png"


def check_matplotlib() -> None:
    """Raise `MissingDependencyError` when there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError.of("Plots need matplotlib", "bench") from error


def draw_all(content: Mapping[str, Any]) -> dict[str, bytes]:
    """The pictures of a run by file name, as PNG; speedups and histogram only where there are any.

    Raises `MissingDependencyError`.
    """
    check_matplotlib()
    figures = {SPEEDUP: _speedups(content), ACCEPTED: _histogram(content), CONTEXT: _speed(content)}
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def draw_trees(content: Mapping[str, Any]) -> bytes:
    """Tokens per round and speed over the size of draft trees, as PNG.

    Args:
        content: what `bench --trees` reports: the model, the machine and a row per way.

    Raises `MissingDependencyError`.
    """
    check_matplotlib()
    rows = {row["way"]: row for row in content["tree_budget"]}
    ways = [way for way in rows if way not in ("plain", "auto")]  # chains first, then the sizes
    figure, left = _figure(content, "Tokens per round", width=11)
    grid = figure.add_gridspec(1, 2)
    left.set_subplotspec(grid[0])
    for category in rows["chain"]["tokens_per_round"]:
        lengths = [rows[way]["tokens_per_round"][category] for way in ways]
        style = {"color": "black", "linewidth": 2.5} if category == "all" else {"alpha": 0.7}
        left.plot(ways, lengths, marker="o", label=category, **style)
    left.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    right = figure.add_subplot(grid[1])
    right.set_title("Tokens per second", loc="left", fontweight="bold")
    right.spines[["top", "right"]].set_visible(False)
    speeds = [rows[way]["tokens_per_second"] for way in ways]
    errors = [
        [rows[way]["tokens_per_second"] - rows[way]["low"] for way in ways],
        [rows[way]["high"] - rows[way]["tokens_per_second"] for way in ways],
    ]
    label, color = "fixed (median, quartiles)", COLORS["DDTree"]
    right.errorbar(ways, speeds, yerr=errors, label=label, color=color, marker="o", capsize=2)
    for way, color in (("auto", ON_TRIAL), ("plain", COLORS["plain"])):
        speed = rows[way]["tokens_per_second"]
        right.axhline(speed, color=color, linestyle="--", label=way)
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("rows of the tree")
    return _png(figure)


def _figure(content: Mapping[str, Any], title: str, width: float = 8) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption(content), fontsize=8, color="#555555", x=0.99, ha="right")
    return figure, axes


def caption(content: Mapping[str, Any]) -> str:
    """What a picture must say to be read alone: model, block size, how much was run, and where."""
    machine = content["machine"]
    known = [machine[key] for key in ("chip", "device", "blas", "system") if key in machine]
    parts = [content["model"]]
    if content.get("block_size"):
        parts.append(f"block size {content['block_size']}")
    if prompts := content.get("overall", content).get("prompts"):
        parts.append(f"{prompts} prompts x {content['repeats']} runs")
    parts += [", ".join(known), f"dflash-mlx {machine.get('dflash-mlx', 'unknown')}"]
    return " · ".join(parts)


def _color(way: str) -> str:
    return COLORS.get(way, ON_TRIAL)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _speedups(content: Mapping[str, Any]) -> Figure | None:
    """Bars over plain decoding by category, with the quartiles."""
    rows: Sequence[Mapping[str, Any]] = [*content["categories"], content["overall"]]
    ways = [w for w, way in content["overall"]["ways"].items() if way["speedup"] and w != PLAIN]
    if not ways:
        return None
    figure, axes = _figure(content, "Speedup over plain decoding", max(8, 1.1 * len(rows) + 2))
    bar = 0.8 / len(ways)
    for number, way in enumerate(ways):
        spreads = [row["ways"][way]["speedup"] for row in rows]
        heights = [spread["median"] for spread in spreads]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads],
            [spread["high"] - spread["median"] for spread in spreads],
        ]
        places = [row + (number - (len(ways) - 1) / 2) * bar for row in range(len(rows))]
        bars = axes.bar(places, heights, bar, color=_color(way), label=way, yerr=errors, capsize=2)
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=7, padding=2)
    axes.axhline(1, color=COLORS[PLAIN], linewidth=1, linestyle="--")
    axes.set_xticks(range(len(rows)), [row["category"] for row in rows], rotation=25, ha="right")
    axes.set_ylabel("times plain (median, quartiles)")
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return figure


def _histogram(content: Mapping[str, Any]) -> Figure | None:
    """How many drafted tokens the rounds kept: a line of shares per way."""
    ways = content["overall"]["ways"]
    kept_by_way = {
        name: {int(kept): rounds for kept, rounds in ways[name]["accepted"].items()}
        for name in drafting(ways)
        if ways[name]["accepted"]
    }
    if not kept_by_way:
        return None
    figure, axes = _figure(content, "Drafted tokens kept in a round")
    bar = 0.8 / len(kept_by_way)
    for number, (name, counts) in enumerate(kept_by_way.items()):
        rounds = sum(counts.values())
        mean = sum(kept * count for kept, count in counts.items()) / rounds
        places = [kept + (number - (len(kept_by_way) - 1) / 2) * bar for kept in counts]
        shares = [100 * count / rounds for count in counts.values()]
        axes.bar(places, shares, bar, color=_color(name), label=f"{name}, mean {mean:.1f}")
    axes.set_xlabel("tokens kept")
    axes.set_ylabel("% of the rounds")
    axes.set_xticks(range(max(max(counts) for counts in kept_by_way.values()) + 1))
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return figure


def _speed(content: Mapping[str, Any]) -> Figure:
    """Speed of every prompt over the length of its context, prompt and half of the answer."""
    figure, axes = _figure(content, "Speed over context length")
    for name in content["overall"]["ways"]:
        points = [
            (one["prompt_tokens"] + one["output_tokens"] / 2, median(way["tokens_per_second"]))
            for one in content["prompts"]
            if (way := one["ways"].get(name))
        ]
        lengths, speeds = zip(*sorted(points), strict=True)
        axes.scatter(lengths, speeds, s=24, alpha=0.6, color=_color(name), linewidths=0, label=name)
        centres = sorted(
            (_centre(row), row["ways"][name]["tokens_per_second"]["median"])
            for row in (content["categories"] if content["context_lengths"] else ())
        )
        if centres:
            axes.plot(*zip(*centres, strict=True), color=_color(name))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the context (prompt and half of the answer)")
    axes.set_ylabel("tokens per second")
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return figure


def _centre(row: Mapping[str, Any]) -> float:
    """The context of a category in the middle of its answers."""
    return row["prompt_tokens"] + row["output_tokens"] / row["prompts"] / 2
