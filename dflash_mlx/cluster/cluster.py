"""Joining the other machines: what makes a process one rank of several."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ClusterError, SettingsError
from ..loading.checkpoint import check_runs
from ..loading.load import load_target
from ..targets import Target
from ..validation import ErrorWrapper
from .leader import LOST, Leader
from .pipeline import LeadingStage, Limits, Stage, carried, limits
from .post import LOADED, MET
from .sessions import LeadingTarget
from .shards import split_by_heads, split_by_layers
from .watchdog import STALL_SECONDS, Watch
from .wire import Wire
from .worker import Worker

SILENCE_SECONDS = 60.0  # of rank 0: it beats, unless it is stopped


class Cluster:
    """This process's place among the machines that share a target.

    Every process of `mlx.launch`, or of `dflash-mlx --hosts`, makes one. Rank 0 hands it to
    `dm.load(..., cluster=cluster)` and goes on as if there were one machine; all others `follow`.

    Args:
        stall: seconds after which a forward that does not end is given up.
        lost: called once, in any thread, when machines have lost each other, with what is wrong;
            and whether a thread waits for them that will not come back.
        tell: called with `LOADED` when this one's part is in memory, and `MET` when all are.
        pipeline: each rank gets some of the layers, in place of its heads of all layers.

    Attributes:
        rank, size: of this process, and how many there are; a size of 1 is no cluster.

    Raises `ClusterError` when the others cannot be reached.
    """

    def __init__(
        self,
        stall: float = STALL_SECONDS,
        lost: Callable[[ClusterError, bool], Any] = lambda error, stuck: None,
        tell: Callable[[str], Any] = lambda phase: None,
        pipeline: bool = False,
    ) -> None:
        with ErrorWrapper(ClusterError, "The machines of the cluster cannot be reached"):
            group = mx.distributed.init()
        self._wire, self._stall, self._lost = Wire(group), stall, lost
        self._tell, self._pipeline = tell, pipeline
        self._patience = max(SILENCE_SECONDS, stall)
        self._whole_head: nn.Module | None = None
        self._layers = 0  # of a model in a pipeline
        self._leader: Leader | None = None
        self.rank, self.size = self._wire.rank, self._wire.size

    @property
    def leader(self) -> Leader:
        """Of rank 0, once its target is loaded."""
        assert self._leader is not None
        return self._leader

    def follow(self, name: str, bits: int | None = None, **settings: Any) -> None:
        """As any rank but the first: load a shard, and do what rank 0 tells, to the end.

        Args:
            name, bits, settings: as of `dm.load_target`, the same on all ranks.

        Raises the errors of `load_target`, and `ClusterError` when rank 0 is lost.
        """
        self.work(load_target(name, bits, cluster=self, **settings))

    def work(self, target: Target) -> Worker:
        """The part of `follow` that comes after loading."""
        worker = Worker(self._wire, target, self._carry)
        watch = Watch(self._patience, self._silent)
        try:
            worker.follow(watch)
        finally:
            watch.close()
        return worker

    def meet(self, word: int = 0) -> list[int]:
        """Wait for all ranks, each with a word; all words by rank. Not while one follows."""
        return self._wire.meet(word)

    def close(self) -> None:
        """Let the others go, as rank 0."""
        if self._leader is not None:
            self._leader.close()

    def shard(self, name: str, model: nn.Module) -> None:
        """Leave this rank its part of a model; see `loading.spread`."""
        if self._pipeline:
            self._layers = split_by_layers(name, model, self._wire.group)
            return
        self._whole_head = split_by_heads(name, model, self._wire.group)
        if self._whole_head is not None and self.rank == 0:
            mx.eval(self._whole_head.parameters())

    def open(self, *of: Any) -> Target:
        """A target of this rank's part; see `loading.spread`."""
        self._tell(LOADED)
        self._meet()
        self._tell(MET)
        target = self._open_stage(*of) if self._pipeline else self._open_heads(*of)
        if isinstance(target, LeadingTarget):
            check_runs(target)
        return target

    def _open_heads(self, *of: Any) -> Target:
        if self.rank:
            return Target(*of)
        return LeadingTarget(self._lead(), self._whole_head, *of)

    def _open_stage(self, *of: Any) -> Target:
        """What the layers of one rank do not allow, none does."""
        target = Stage(self._layers, *of)
        own = limits(target)
        words = self._meet(own)
        if len({word & Limits.NO_FOREST for word in words}) > 1:
            raise SettingsError(
                f"{target.name}: its layers take several requests in different ways, leave "
                "--pipeline out, or use one machine."
            )
        if self.rank:
            return target
        limit = reduce(or_, map(Limits, words))
        return LeadingStage(limit, self._layers, self._lead(), None, *of)

    def _lead(self) -> Leader:
        self._leader = Leader(self._wire, self._stall, self._lost, self._carry)
        return self._leader

    def _meet(self, word: int = 0) -> list[int]:
        with ErrorWrapper(ClusterError, "The machines of the cluster do not come together"):
            return self._wire.meet(word)

    def _carry(self, answer: Any) -> Any:
        """What a forward gives on all ranks together."""
        return carried(self._wire.group, answer) if self._pipeline else answer

    def _silent(self, seconds: float) -> None:
        self._lost(ClusterError(f"{LOST}: rank 0 has been silent for {seconds:.0f} s."), True)
