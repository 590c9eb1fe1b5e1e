"""What a round asks of the device, counted without a clock.

MLX's own export (`mx.export_function`) tells every primitive of a graph that nothing has computed
yet, with shapes and types. Shapes do not change which primitives there are, so a model of few
numbers and many layers is counted as well as a large one. What `mx.compile` makes one kernel of is
counted by its parts. On a CPU norms, rotations and attention are several primitives each, which are
one kernel each on Metal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from types import FrameType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from ..drafter.network import DFlash
from ..drafter.protocol import Drafter
from ..generation import GenerationSettings, start_request
from ..loop import play_alone
from ..targets import Target
from .leanest import Leanest

# What reads its input where it lies; a reshaped array may have to be copied all the same.
VIEWS = {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"}
VIEWS |= {"StopGradient", "Transpose", "Unflatten", "View"}
COPIES = {"AsType", "Concatenate", "Contiguous", "Copy", "Pad"}  # what writes only what it reads
UPDATES = {"SliceUpdate", "DynamicSliceUpdate"}  # a cache's: the new rows are written, no others
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")  # of `mx.fast`
SETTLED = 2  # rounds before the one that counts


@dataclass
class Graph:
    """What is in one or several graphs.

    Attributes:
        nodes: primitives.
        launches: those that are no views: kernels that run.
        copies: those of them that only move numbers.
        copied_bytes: that these write.
    """

    nodes: int = 0
    launches: int = 0
    copies: int = 0
    copied_bytes: int = 0

    def add(self, primitive: dict[str, Any]) -> None:
        """Count one primitive, as the export tells it."""
        name = primitive["name"]
        self.nodes += 1
        self.launches += name not in VIEWS
        if name in COPIES or name in UPDATES:
            self.copies += 1
            written = primitive["inputs"][1:2] if name in UPDATES else primitive["outputs"]
            self.copied_bytes += sum(prod(shape) * kind.size for _, shape, kind in written)


@dataclass
class Round:
    """What one round asks of the device.

    Attributes:
        rows: that were verified.
        passes: graphs that were handed over, each a fence for what uses it.
        waits: passes of this round that the host has waited for before it went on.
        graph: what was in them.
        calls: of Python functions, in the round after it: the host's part but for the graph's.
    """

    rows: int
    passes: int
    waits: int
    graph: Graph
    calls: int = 0


def count_into(graph: Graph, *arrays: Any) -> bool:
    """Add what computing arrays (or trees of them) would run; whether that is anything."""
    lazy = [leaf for _, leaf in tree_flatten(list(arrays)) if isinstance(leaf, mx.array)]
    before, told = graph.nodes, list[dict[str, Any]]()
    if lazy:
        mx.export_function(told.append, lambda _: lazy, mx.array(0))
    for one in told:
        if one["type"] == "primitive":
            graph.add(one)
    return graph.nodes > before


@contextmanager
def counted(rows: int, fused: bool = False) -> Iterator[Round]:
    """Count what is handed over inside by `mx.eval` and `mx.async_eval`; `tolist` is not seen.

    With `fused` one primitive stands for each norm, rotation and attention, as on Metal, and what
    is computed is none of them.
    """
    found = Round(rows, 0, 0, Graph())
    wait, start = mx.eval, mx.async_eval

    def waited(*arrays: Any) -> None:
        something = count_into(found.graph, *arrays)
        found.passes, found.waits = found.passes + something, found.waits + something
        wait(*arrays)

    def started(*arrays: Any) -> None:
        found.passes += count_into(found.graph, *arrays)
        start(*arrays)

    mx.disable_compile()  # what is compiled into one kernel cannot be exported
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.object(mx, "eval", waited))
            patches.enter_context(patch.object(mx, "async_eval", started))
            for name in FUSED if fused else ():
                patches.enter_context(patch.object(mx.fast, name, _stand_in))
            yield found
    finally:
        mx.enable_compile()


def count_calls(work: Callable[[], object]) -> int:
    """How many Python functions are called: a busy machine calls no more of them."""
    calls, before = 0, sys.getprofile()

    def saw(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(saw)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def _stand_in(x: mx.array, *others: Any, **settings: Any) -> mx.array:
    """An array of the shape of x that needs all arrays given, by one primitive."""
    arrays = [one for one in (*others, *settings.values()) if isinstance(one, mx.array)]
    return mx.depends([x], arrays)[0]


def count_round(
    target: Target, drafter: Drafter | None, prompt: list[int], rows: int, fused: bool = False
) -> Round | None:
    """A round of so many rows behind a prompt; None if the text ends before the one after it."""
    settings = GenerationSettings(max_tokens=10_000, block_size=rows)
    request = start_request(target, drafter, prompt, settings)
    request.resume()
    for _ in request.read():
        pass
    for _ in range(SETTLED):
        if not request.finished:
            play_alone(request)
    if request.finished:
        return None
    with counted(rows, fused) as found:
        play_alone(request)
    if request.finished:
        return None
    found.calls = count_calls(lambda: play_alone(request))
    request.close()
    return found


def count_leanest(
    target: Target, drafter: DFlash, prompt: list[int], rows: int, fused: bool = False
) -> Round:
    """The same of the leanest round, for a pair that has one (`leanest.why_not`)."""
    leanest = Leanest(target, drafter)
    leanest.prefill(prompt)
    for _ in range(SETTLED):
        leanest.round(rows)
    with counted(rows, fused) as found:
        leanest.round(rows)
    found.calls = count_calls(lambda: leanest.round(rows))
    return found
