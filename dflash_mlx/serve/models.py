"""The models that a server offers: loaded when a request names them, and unloaded when idle.

A model that does not fit beside the loaded ones takes the memory of the one that was used longest
ago, after its last answer. Requests for these two wait meanwhile, in their order, so that two
models that share the memory take turns; requests for other models do not wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import mlx.core as mx

from ..errors import DFlashError, NotEnoughMemoryError
from ..threads import clean_up_at_end
from .errors import RequestError, shutting_down
from .handler import RequestHandler

LATEST: Final = ":latest"  # Ollama's clients add it to names without a tag

log = logging.getLogger("dflash_mlx.serve")


@dataclass(eq=False)
class OfferedModel:
    """A model that requests can name.

    Attributes:
        name: in requests and responses.
        load: loads it beside so many bytes of others, in a thread; None for one that stays loaded.
        handler: answers its requests; None while it is not loaded.
        aliases: other names in requests.
        path: its folder or GGUF file, if it is on this machine.
        used: when a request was last answered.
        created: when it was loaded last, or offered, in seconds since 1970.
        lock: held while it is loaded, waits to be unloaded, or is unloaded.
    """

    name: str
    load: Callable[[int], RequestHandler] | None = None
    handler: RequestHandler | None = None
    aliases: Sequence[str] = ()
    path: Path | None = None
    used: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Models:
    """The models of one server. All methods are for its event loop.

    A server of a single model answers under any name; of several, the first one answers requests
    that name none.

    Args:
        offered: the models, in the order in which they are listed; each has an engine of its own.
        idle_seconds: without a request, after which a model is unloaded; None keeps it.
        clock: in seconds.
    """

    def __init__(
        self,
        offered: Sequence[OfferedModel],
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offered, self._idle_seconds, self._clock = list(offered), idle_seconds, clock
        self._stopping = False
        self._room = asyncio.Lock()  # held by the one model that others make room for
        self._thread = ThreadPoolExecutor(1, "dflash-load", clean_up_at_end)
        for model in self.offered:
            model.used = clock()

    @property
    def handlers(self) -> list[RequestHandler]:
        """The handlers of the loaded models."""
        return [model.handler for model in self.offered if model.handler is not None]

    @property
    def busy(self) -> bool:
        """Whether a client waits for an answer."""
        return any(handler.busy for handler in self.handlers)

    @property
    def draining(self) -> bool:
        """Whether the server stops."""
        return self._stopping or self.lost

    @property
    def lost(self) -> bool:
        """Whether machines that share a model have lost each other."""
        return any(handler.lost for handler in self.handlers)

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the last step of an engine that has something to do; 0 if none has."""
        return max((handler.seconds_since_step for handler in self.handlers), default=0.0)

    def drain(self) -> None:
        """Refuse new requests; open answers go on."""
        self._stopping = True

    def abort(self) -> None:
        """End all answers."""
        for handler in self.handlers:
            handler.abort()

    def find(self, name: str) -> OfferedModel:
        """The model that a name means. Raises `RequestError` 404, with the names that there are."""
        for model in self.offered:
            names = [one.removesuffix(LATEST) for one in (model.name, *model.aliases)]
            if len(self.offered) == 1 or name.removesuffix(LATEST) in names:
                return model
        if name in ("", "default"):
            return self.offered[0]
        known = ", ".join(model.name for model in self.offered)
        message = f"There is no model {name[:100]!r} here: this server offers {known}."
        raise RequestError(message, 404, code="model_not_found")

    async def use(self, name: str) -> tuple[OfferedModel, RequestHandler]:
        """The model that a name means, loaded, and its handler.

        The handler has to get its request before anything else is awaited: then the model stays.
        Raises `RequestError`: 404 as `find`, 500 or 503 if the model cannot be loaded.
        """
        model = self.find(name)
        async with model.lock:
            if model.handler is None and not await self._load(model):
                async with self._room:
                    while not await self._load(model):
                        await self._make_room()
            if self.draining:  # it may begin while a model loads
                raise shutting_down()
            assert model.handler is not None
            model.used = self._clock()
            return model, model.handler

    async def unload(self, name: str) -> bool:
        """Unload a model, unless it is busy or stays. Whether it is unloaded; raises as `find`."""
        model = self.find(name)
        async with model.lock:
            if model.handler is not None and model.handler.idle.is_set():
                await self._unload(model)
            return model.handler is None

    async def unload_idle(self) -> None:
        """Unload the models that no request has used for `idle_seconds`."""
        if self._idle_seconds is None or self.draining:
            return
        for model in self.offered:
            if model.lock.locked() or model.handler is None:
                continue
            if not model.handler.idle.is_set():
                model.used = self._clock()
            elif self._clock() - model.used >= self._idle_seconds:
                async with model.lock:
                    await self._unload(model)

    async def _load(self, model: OfferedModel) -> bool:
        """Load a model; whether it fits beside the loaded ones. Raises `RequestError`."""
        if self.draining:
            raise shutting_down()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, _open, model)
        except DFlashError as error:
            too_large = isinstance(error, NotEnoughMemoryError)
            if too_large and self._movable:
                return False
            log.error("%s cannot be loaded: %s", model.name, error)
            # The error may name a folder of this machine.
            why = "cannot be loaded: see the server's log."
            why = "does not fit into this machine's memory." if too_large else why
            raise RequestError(f"{model.name} {why}", 503 if too_large else 500) from error
        return True

    @property
    def _movable(self) -> list[OfferedModel]:
        """The loaded models that may be unloaded."""
        return [one for one in self.offered if one.handler is not None and one.load is not None]

    async def _make_room(self) -> None:
        """Unload the model that was used longest ago, after its last answer."""
        oldest = min(self._movable, key=lambda one: one.used, default=None)
        if oldest is None:  # unloaded meanwhile
            return
        async with oldest.lock:
            if oldest.handler is not None:
                await oldest.handler.idle.wait()
                await self._unload(oldest)

    async def _unload(self, model: OfferedModel) -> None:
        """Unload a model that is idle; its lock is held."""
        handler = model.handler
        if model.load is not None and handler is not None:
            model.handler = None  # before the thread: no request may get it any more
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, handler.close)
            del handler
            await loop.run_in_executor(self._thread, _free)
            log.info("%s is unloaded", model.name)


def _open(model: OfferedModel) -> None:
    """Load a model beside everything that this process has on the device."""
    assert model.load is not None
    _free()
    model.handler = model.load(mx.get_active_memory())
    model.created = int(time.time())
    log.info("%s is loaded", model.name)


def _free() -> None:
    """Give the device the memory back that nothing refers to."""
    gc.collect()
    mx.clear_cache()
