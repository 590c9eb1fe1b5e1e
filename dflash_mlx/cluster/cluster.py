"""Joining a cluster: one process becomes one of several ranks."""

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
from .channel import MLX_ERRORS, Channel
from .leader import LOST, Leader
from .pipeline import LeaderStage, Limits, PipelineStage, gather_taps, limits
from .shards import split_by_heads, split_by_layers
from .target import LeaderTarget
from .watchdog import STALL_SECONDS, Watchdog
from .worker import RankWorker

SILENCE_SECONDS = 60.0  # without a message of rank 0, which sends heartbeats


class Cluster:
    """This process's place among the machines that share a target.

    Every process of `mlx.launch`, or of `dflash-mlx --hosts`, makes one. Rank 0 passes it to
    `dm.load(..., cluster=cluster)` and goes on as on one machine; the other ranks call `follow`.

    Args:
        stall: seconds after which a forward is given up.
        lost: called once, in any thread, when a rank is lost, with the error and whether a thread
            waits forever.
        met: called when all ranks have loaded their parts.
        pipeline: gives each rank some of the layers instead of some heads of all layers.

    Attributes:
        rank, size: this rank, and the number of ranks; a size of 1 is no cluster.

    Raises `ClusterError` when the other ranks cannot be reached.
    """

    def __init__(
        self,
        stall: float = STALL_SECONDS,
        lost: Callable[[ClusterError, bool], Any] = lambda error, stuck: None,
        met: Callable[[], Any] = lambda: None,
        pipeline: bool = False,
    ) -> None:
        with ErrorWrapper(
            ClusterError, "The machines of the cluster cannot be reached", MLX_ERRORS
        ):
            group = mx.distributed.init()
        self.channel, self._stall, self._lost = Channel(group), stall, lost
        self._met, self._pipeline = met, pipeline
        self._whole_head: nn.Module | None = None
        self._layers = 0  # of the whole model, in a pipeline
        self._leader: Leader | None = None
        self.rank, self.size = self.channel.rank, self.channel.size

    @property
    def leader(self) -> Leader:
        """Rank 0's, once its target is loaded."""
        assert self._leader is not None
        return self._leader

    def follow(self, name: str, bits: int | None = None, **settings: Any) -> None:
        """As any rank but 0: load this rank's part, and repeat what rank 0 does until it ends.

        Args:
            name, bits, settings: as for `dm.load_target`, the same on all ranks.

        Raises the errors of `load_target`, and `ClusterError` when rank 0 is lost.
        """
        self.work(load_target(name, bits, cluster=self, **settings))

    def work(self, target: Target) -> RankWorker:
        """The part of `follow` after loading."""
        worker = RankWorker(self.channel, target, self._gather)
        watchdog = Watchdog(max(SILENCE_SECONDS, self._stall), self._silent)
        try:
            worker.run(watchdog)
        finally:
            watchdog.close()
        return worker

    def close(self) -> None:
        """As rank 0: let the other ranks end."""
        if self._leader is not None:
            self._leader.close()

    def shard(self, name: str, model: nn.Module) -> None:
        """Reduce a model to this rank's part; see `SupportsSharding`."""
        if self._pipeline:
            self._layers = split_by_layers(name, model, self.channel.group)
            return
        self._whole_head = split_by_heads(name, model, self.channel.group)
        if self._whole_head is not None and self.rank == 0:
            mx.eval(self._whole_head.parameters())

    def open(self, *of: Any) -> Target:
        """The target of this rank's part; see `SupportsSharding`."""
        self._meet()
        self._met()
        target = self._open_stage(*of) if self._pipeline else self._open_heads(*of)
        if isinstance(target, LeaderTarget):
            check_runs(target)
        return target

    def _open_heads(self, *of: Any) -> Target:
        if self.rank:
            return Target(*of)
        return LeaderTarget(self._lead(), self._whole_head, *of)

    def _open_stage(self, *of: Any) -> Target:
        """A stage, with the limits of all ranks."""
        target = PipelineStage(self._layers, *of)
        found = self._meet(limits(target))
        if len({one & Limits.NO_BATCH for one in found}) > 1:
            raise SettingsError(
                f"{target.name}: its layers take several requests in different ways, leave "
                "--pipeline out, or use one machine."
            )
        if self.rank:
            return target
        return LeaderStage(reduce(or_, map(Limits, found)), self._layers, self._lead(), None, *of)

    def _lead(self) -> Leader:
        self._leader = Leader(self.channel, self._stall, self._lost, self._gather)
        return self._leader

    def _meet(self, word: int = 0) -> list[int]:
        with ErrorWrapper(
            ClusterError, "The machines of the cluster do not come together", MLX_ERRORS
        ):
            return self.channel.meet(word)

    def _gather(self, result: Any) -> Any:
        """A forward's result, completed from all ranks."""
        return gather_taps(self.channel.group, result) if self._pipeline else result

    def _silent(self, seconds: float) -> None:
        self._lost(ClusterError(f"{LOST}: rank 0 has been silent for {seconds:.0f} s."), True)
