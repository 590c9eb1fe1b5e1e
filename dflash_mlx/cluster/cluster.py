"""Joining a cluster: this process becomes one of several ranks that share a target."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import reduce
from operator import or_
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ClusterError, DFlashError, SettingsError
from ..loading.load import load_target
from ..loading.target_loader import check_runs
from ..targets import Target
from ..validation import ErrorWrapper
from .channel import MLX_ERRORS, NO_ANSWER, Channel
from .leader import Leader
from .leader_target import LeaderTarget
from .member import LOST, LOST_CODE, RankProcess, rank
from .pipeline import LeaderStage, Limits, PipelineStage, limits
from .shards import check_rollback, split_by_heads, split_by_layers
from .watchdog import STALL_SECONDS, Watchdog
from .worker import RankWorker

SILENCE_SECONDS = 60.0  # without a message of rank 0, which sends heartbeats


class Cluster:
    """This process's place among the machines that share a target.

    Every process of `mlx.launch`, or of `dflash-mlx --hosts`, makes one. Rank 0 passes it to
    `dm.load(..., cluster=cluster)` and goes on as on one machine; the other ranks call `follow`.

    Args:
        stall: seconds after which a forward is given up.
        pipeline: gives each rank some of the layers instead of some heads of all layers.
        process: how a supervisor started this process; None if another launcher did.

    Attributes:
        rank, size: this rank, and the number of ranks; with size 1 there is no cluster.
        end: called first, in any thread, when the other ranks are lost, with the error; None ends
            the process at once if a thread waits for them forever.
        interrupted: whether Ctrl-C was pressed while this rank followed.

    Raises `ClusterError` when the other ranks cannot be reached.
    """

    def __init__(
        self,
        stall: float = STALL_SECONDS,
        pipeline: bool = False,
        process: RankProcess | None = None,
    ) -> None:
        self.end: Callable[[DFlashError], Any] | None = None
        self.interrupted = False
        self._process = process
        self._lost_once = threading.Lock()
        if process is not None:
            process.lost = lambda problem: self._lost(DFlashError(problem), False)
        with ErrorWrapper(
            ClusterError, "The machines of the cluster cannot be reached", MLX_ERRORS
        ):
            group = mx.distributed.init()
        self.channel = Channel(group, pipeline)
        self._stall = stall
        self._pipeline = pipeline
        self._whole_head: nn.Module | None = None
        self._layers = 0  # of the whole model, in a pipeline
        self._leader: Leader | None = None
        self.rank = self.channel.rank
        self.size = self.channel.size
        if self.size == 1 and (rank() or process is not None):
            raise ClusterError(
                "MLX has not connected to any other machine: its backend does not work here. "
                "'dflash-mlx doctor --hosts FILE' says which one does."
            )

    @property
    def leader(self) -> Leader:
        """What sends rank 0's operations to the other ranks, once the target is loaded."""
        assert self._leader is not None
        return self._leader

    def tell(self, word: str, reason: str = "") -> None:
        """Send a message to the supervisor, if there is one."""
        if self._process is not None:
            self._process.send(word, reason)

    def follow(self, name: str, bits: int | None = None, **settings: Any) -> None:
        """Load this rank's part, and repeat what rank 0 does until it ends. Not for rank 0.

        Args:
            name, bits, settings: as for `dm.load_target`, the same on all ranks.

        Raises the errors of `load_target`, and `ClusterError` when rank 0 is lost.
        """
        self.work(load_target(name, bits, cluster=self, **settings))

    def work(self, target: Target) -> RankWorker:
        """Repeat what rank 0 does until it ends: what `follow` does after loading."""
        worker = RankWorker(self.channel, target)
        watchdog = Watchdog(max(SILENCE_SECONDS, self._stall), self._silent)
        try:
            worker.run(watchdog)
        finally:
            watchdog.close()
        return worker

    def close(self) -> None:
        """Let the other ranks end. Only rank 0 does."""
        if self._leader is not None:
            self._leader.close()

    def shard(self, name: str, model: nn.Module) -> None:
        """Reduce a model to this rank's heads or layers, before its weights are read.

        Raises `SettingsError` for a model that cannot be split.
        """
        check_rollback(name, model)
        if self._pipeline:
            self._layers = split_by_layers(name, model, self.channel.group)
            return
        self._whole_head = split_by_heads(name, model, self.channel.group)
        if self._whole_head is not None and self.rank == 0:
            mx.eval(self._whole_head.parameters())

    def open(self, model: nn.Module, tokenizer: Any, config: dict[str, Any], name: str) -> Target:
        """Make the target of this rank's part, once all ranks have loaded theirs.

        Raises:
            ClusterError: a rank is lost.
            SettingsError: a pipeline cannot run this model.
        """
        self._meet()
        if self.rank:  # from now on rank 0 decides when it is over
            signal.signal(signal.SIGINT, self._interrupt)
        if self._pipeline:
            return self._open_stage(model, tokenizer, config, name)
        if self.rank:
            return Target(model, tokenizer, config, name)
        self._leader = Leader(self.channel, self._stall, self._lost)
        target = LeaderTarget(self._leader, self._whole_head, model, tokenizer, config, name)
        check_runs(target)
        return target

    def _open_stage(
        self, model: nn.Module, tokenizer: Any, config: dict[str, Any], name: str
    ) -> Target:
        """Make the target of this rank's layers, in a pipeline. Raises `SettingsError`."""
        stage = PipelineStage(self._layers, model, tokenizer, config, name)
        rank_limits = [Limits(number) for number in self._meet(limits(stage))]
        batch_limits = {limit & Limits.NO_BATCH for limit in rank_limits}
        if len(batch_limits) > 1:
            raise SettingsError(
                f"{stage.name}: its layers differ in how they batch requests: leave "
                "--pipeline out, or use one machine."
            )
        if self.rank:
            return stage
        self._leader = Leader(self.channel, self._stall, self._lost)
        # The whole model's limits; a pipeline does not split the head.
        limit = reduce(or_, rank_limits)
        target = LeaderStage(
            limit, self._layers, self._leader, None, model, tokenizer, config, name
        )
        check_runs(target)
        return target

    def _meet(self, word: int = 0) -> list[int]:
        """Wait for all ranks. Returns the number that each of them sent, by rank."""
        with ErrorWrapper(
            ClusterError, "The machines of the cluster cannot connect to each other", MLX_ERRORS
        ):
            return self.channel.meet(word)

    def _silent(self, seconds: float) -> None:
        self._lost(ClusterError(f"{NO_ANSWER}: rank 0 has been silent for {seconds:.0f} s."), True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def _lost(self, error: DFlashError, stuck: bool) -> None:
        """End, from any thread; `stuck` if one waits for the other ranks forever."""
        if not self._lost_once.acquire(blocking=False):
            return
        if self.end is not None:
            self.end(error)
        self.tell(LOST, str(error))
        if self.end is None and stuck:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(LOST_CODE)
