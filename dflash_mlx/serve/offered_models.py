"""The models that a server offers. They are loaded on request, and unloaded when idle.

A model that does not fit together with the loaded ones replaces the one that was used longest ago,
after its last answer. Meanwhile requests for these two models wait, in their order, so that two
models that share the memory take turns. Requests for other models do not wait.
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
from .handler import RequestHandler
from .http_errors import RequestError, shutting_down

LATEST: Final = ":latest"  # the tag that Ollama's clients add to names without one

log = logging.getLogger("dflash_mlx.serve")


@dataclass(eq=False)
class OfferedModel:
    """A model that requests can name.

    Attributes:
        name: the name in requests and responses.
        load: loads the model, in a thread; gets the number of bytes that other models take. None if
            the model is always loaded.
        handler: answers requests; None while the model is not loaded.
        aliases: other names in requests.
        path: the model's folder or GGUF file; None if it is not on this machine.
        used: when a request was last answered.
        created: when the model was last loaded, or offered, in seconds since 1970.
        lock: held while the model is loaded, waits to be unloaded, or is unloaded.
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
    """The models of one server. Call its methods in the event loop.

    A server with a single model accepts any name. If there are several, the first one answers
    requests that name none.

    Args:
        offered: the models, in the order of lists; each has its own engine.
        idle_seconds: a model is unloaded after as long without a request; None keeps it.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        offered: Sequence[OfferedModel],
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offered = list(offered)
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._stopping = False
        self._room = asyncio.Lock()  # held by the model for which others are unloaded
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
        """Whether the server refuses requests, because it stops."""
        return self._stopping or self.lost

    @property
    def lost(self) -> bool:
        """Whether machines that share a model have lost each other."""
        return any(handler.lost for handler in self.handlers)

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the last step of an engine that has work; 0 if none has."""
        return max((handler.seconds_since_step for handler in self.handlers), default=0.0)

    def drain(self) -> None:
        """Refuse new requests. Open answers continue."""
        self._stopping = True

    def abort(self) -> None:
        """End all answers."""
        for handler in self.handlers:
            handler.abort()

    def find(self, name: str) -> OfferedModel:
        """Find a model by its name. Raises `RequestError` 404, which lists the names.

        If only one model is offered, any name means it.
        """
        if len(self.offered) == 1:
            return self.offered[0]
        for model in self.offered:
            names = [alias.removesuffix(LATEST) for alias in (model.name, *model.aliases)]
            if name.removesuffix(LATEST) in names:
                return model
        if name in ("", "default"):
            return self.offered[0]
        all_names = ", ".join(model.name for model in self.offered)
        message = f"There is no model {name[:100]!r} here: this server offers {all_names}."
        raise RequestError(message, 404, code="model_not_found")

    async def use(self, name: str) -> tuple[OfferedModel, RequestHandler]:
        """Find a model by its name, and load it. Returns it and its handler.

        Pass the request to the handler before anything else is awaited. Otherwise the model may be
        unloaded first.

        Raises `RequestError`: 404 if there is no such model, 500 or 503 if it cannot be loaded.
        """
        model = self.find(name)
        async with model.lock:
            if model.handler is None and not await self._load(model):
                async with self._room:
                    while not await self._load(model):
                        await self._make_room()
            if self.draining:  # the server may have stopped while the model was loaded
                raise shutting_down()
            assert model.handler is not None
            model.used = self._clock()
            return model, model.handler

    async def unload(self, name: str) -> bool:
        """Unload a model, unless it is busy or always loaded. Returns whether it is unloaded.

        Raises `RequestError` 404 if there is no such model.
        """
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
        """Load a model. Returns False if others must be unloaded first. Raises `RequestError`."""
        if self.draining:
            raise shutting_down()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, _open, model)
        except DFlashError as error:
            is_too_large = isinstance(error, NotEnoughMemoryError)
            if is_too_large and self._unloadable:
                return False
            log.error("%s cannot be loaded: %s", model.name, error)
            if is_too_large:
                message = f"{model.name} does not fit into this machine's memory."
                raise RequestError(message, 503) from error
            # Clients do not see the error itself, because it may name a folder of this machine.
            message = f"{model.name} cannot be loaded: see the server's log."
            raise RequestError(message, 500) from error
        return True

    @property
    def _unloadable(self) -> list[OfferedModel]:
        """The loaded models that may be unloaded."""
        return [model for model in self.offered if model.handler and model.load]

    async def _make_room(self) -> None:
        """Unload the model that was used longest ago, after its last answer."""
        oldest = min(self._unloadable, key=lambda model: model.used, default=None)
        if oldest is None:  # the others have been unloaded in the meantime
            return
        async with oldest.lock:
            if oldest.handler is not None:
                await oldest.handler.idle.wait()
                await self._unload(oldest)

    async def _unload(self, model: OfferedModel) -> None:
        """Unload a model that is idle. The caller holds its lock."""
        handler = model.handler
        if model.load is not None and handler is not None:
            model.handler = None  # so that no request gets it while the thread closes it
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, handler.close)
            del handler
            await loop.run_in_executor(self._thread, _free)
            log.info("%s is unloaded", model.name)


def _open(model: OfferedModel) -> None:
    """Load a model into the memory that this process leaves on the device."""
    assert model.load is not None
    _free()
    model.handler = model.load(mx.get_active_memory())
    model.created = int(time.time())
    log.info("%s is loaded", model.name)


def _free() -> None:
    """Free memory of the device that nothing refers to."""
    gc.collect()
    mx.clear_cache()
