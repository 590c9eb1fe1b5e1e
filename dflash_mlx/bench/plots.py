"""A benchmark run as pictures: speedup by category, accepted tokens per step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError
from .summary import DDTREE, MLX_LM, PLAIN, drafting_methods

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLORS = {PLAIN: "#777777", DDTREE: "#009E73", MLX_LM: "#E69F00"}
CHAIN_COLOR = "#0072B2"  # drafting with chains, whatever the drafter's name
SPEEDUP, ACCEPTANCE = "speedup.png", "acceptance.png"


def check_matplotlib() -> None:
    """Raise `MissingDependencyError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError.of("Plots need matplotlib", "bench") from error


def draw_all(content: Mapping[str, Any]) -> dict[str, bytes]:
    """The pictures of a run by file name, as PNG; none where nothing drafted.

    Raises `MissingDependencyError`.
    """
    check_matplotlib()
    figures = {SPEEDUP: _speedups(content), ACCEPTANCE: _acceptance(content)}
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def caption(content: Mapping[str, Any]) -> str:
    """Model, block size, number of runs and machine, so that a picture can be read alone."""
    machine = content["machine"]
    known = [machine[key] for key in ("chip", "device", "blas", "system") if key in machine]
    parts = [content["model"]]
    if content.get("block_size"):
        parts.append(f"block size {content['block_size']}")
    parts.append(f"{content['overall']['prompts']} prompts x {content['repeats']} runs")
    parts += [", ".join(known), f"dflash-mlx {machine.get('dflash-mlx', 'unknown')}"]
    return " · ".join(parts)


def _figure(content: Mapping[str, Any], title: str, width: float = 8) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption(content), fontsize=8, color="#555555", x=0.99, ha="right")
    return figure, axes


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _speedups(content: Mapping[str, Any]) -> Figure | None:
    """Bars by category with the quartiles, a colour per method."""
    rows: Sequence[Mapping[str, Any]] = [*content["categories"], content["overall"]]
    overall = content["overall"]["methods"]
    methods = [name for name in overall if overall[name]["speedup"] and name != PLAIN]
    if not methods:
        return None
    figure, axes = _figure(content, "Speedup over plain decoding", max(8, 1.1 * len(rows) + 2))
    width = 0.8 / len(methods)
    for number, name in enumerate(methods):
        spreads = [row["methods"][name]["speedup"] for row in rows]
        medians = [spread["median"] for spread in spreads]
        below = [spread["median"] - spread["low"] for spread in spreads]
        above = [spread["high"] - spread["median"] for spread in spreads]
        places = [row + (number - (len(methods) - 1) / 2) * width for row in range(len(rows))]
        bars = axes.bar(
            places,
            medians,
            width,
            color=COLORS.get(name, CHAIN_COLOR),
            label=name,
            yerr=[below, above],
            capsize=2,
        )
        axes.bar_label(bars, [f"{value:.2f}" for value in medians], fontsize=7, padding=2)
    axes.axhline(1, color=COLORS[PLAIN], linewidth=1, linestyle="--")
    axes.set_xticks(range(len(rows)), [row["category"] for row in rows], rotation=25, ha="right")
    axes.set_ylabel("times plain (median, quartiles)")
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return figure


def _acceptance(content: Mapping[str, Any]) -> Figure | None:
    """How many drafted tokens the steps accepted: shares per drafting method."""
    methods = content["overall"]["methods"]
    counts = {
        name: {int(accepted): steps for accepted, steps in methods[name]["accepted"].items()}
        for name in drafting_methods(methods)
        if methods[name]["accepted"]
    }
    if not counts:
        return None
    figure, axes = _figure(content, "Drafted tokens accepted per step")
    width = 0.8 / len(counts)
    for number, (name, steps) in enumerate(counts.items()):
        total = sum(steps.values())
        mean = sum(accepted * count for accepted, count in steps.items()) / total
        places = [accepted + (number - (len(counts) - 1) / 2) * width for accepted in steps]
        shares = [100 * count / total for count in steps.values()]
        color = COLORS.get(name, CHAIN_COLOR)
        axes.bar(places, shares, width, color=color, label=f"{name}, mean {mean:.1f}")
    axes.set_xlabel("accepted tokens")
    axes.set_ylabel("% of the steps")
    axes.set_xticks(range(max(max(steps) for steps in counts.values()) + 1))
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return figure
