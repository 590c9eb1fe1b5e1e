"""`dflash-mlx serve`: a model behind the HTTP APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.member import READY, rank
from dflash_mlx.errors import DFlashError, MissingDependencyError, OutputError, SettingsError
from dflash_mlx.loading.hub import Hub, find
from dflash_mlx.loading.registry import LOOKUP, NONE, local_path, short
from dflash_mlx.machine.facts import usable_bytes
from dflash_mlx.machine.signals import signals_to
from dflash_mlx.validation import ErrorWrapper, user_path

from . import options
from .machines import Machines, cluster_member, inherited_socket, runs_elsewhere
from .options import MODEL, flag, given, option
from .output import note
from .pair import Pair, note_toy, open_pair, published, template_variables, without_template

if TYPE_CHECKING:
    from dflash_mlx import PrefixStore
    from dflash_mlx.cluster.cluster import Cluster
    from dflash_mlx.serve.auth import Auth
    from dflash_mlx.serve.handler import RequestHandler
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.models import Models
    from dflash_mlx.serve.server import APIServer

SERVER = "Server"  # the panel that --help shows
MODELS = "Folder, GGUF, hub name, smollm2 or tiny. Repeatable."
CACHES, PREFIXES = 0.8, 0.25  # of what the weights leave; caches include prefixes
LAST_SECONDS: Final = 2.0  # for clients to hear that the machines lost each other
DEFAULTS = options.settings(max_tokens=options.MAX_TOKENS)
del DEFAULTS["stop"]  # a request's own
PORT = option(8000, SERVER, "PORT", "Port; 0 takes a free one.", "--port", "-p", min=0, max=65535)


@dataclass(frozen=True)
class Access:
    """How clients reach the server, and which ones it answers."""

    host: str = option("127.0.0.1", SERVER, "HOST", "Address to listen on.")
    port: int = PORT
    api_key: list[str] | None = option(None, SERVER, "KEY", "Require this key. Repeatable.")
    api_key_file: Path | None = option(
        None, SERVER, "FILE", "Require a key of FILE (one per line; # comments)."
    )
    no_auth: bool = flag("--no-auth", SERVER, "Answer other machines without a key.")
    allow_host: list[str] | None = option(
        None, SERVER, "NAME", "Another name of this server. Repeatable."
    )
    allow_origin: list[str] | None = option(
        None, SERVER, "URL", "Answer web pages of this origin. Repeatable."
    )


@dataclass(frozen=True)
class Load:
    """How much the server takes on."""

    concurrency: int = option(32, SERVER, "N", "Requests decoded together.", min=1, max=1024)
    queue: int = option(64, SERVER, "N", "Requests that may wait.", min=0)
    memory: float | None = option(
        None, SERVER, "GB", "KV caches. Default: 80% of the rest.", min=0.001
    )
    wire: bool = flag("--wire", SERVER, "Keep the last loaded weights in memory (macOS).")
    prefix_cache: float | None = option(
        None, SERVER, "GB", "Prefixes in it. Default: 25% of the rest.", min=0
    )
    cache_dir: Path | None = option(None, SERVER, "DIR", "Keep shared prefixes on disk, too.")
    cache_disk: float = option(32.0, SERVER, "GB", "Limit of --cache-dir.", min=0.001)
    disk_left: float = option(10.0, SERVER, "GB", "Disk that --cache-dir leaves free.", min=0)
    idle: float | None = option(
        None, SERVER, "MIN", "Unload a model idle this long. Default: never.", min=0
    )
    drain_seconds: float = option(30.0, SERVER, "S", "Time to finish open answers.", min=0)


def serve(
    context: typer.Context,
    *,
    model: list[str] | None = options.model(None, MODELS),
    draft: str | None = options.DRAFT,
    adapter: list[str] | None = option(
        None, MODEL, "PATH", "LoRA, served by its name. Repeatable."
    ),
    drafting: options.Drafting,
    weights: options.Weights,
    access: Access,
    load: Load,
    settings: dict[str, Any] = DEFAULTS,
    machines: Machines,
    verbose: bool = flag("--verbose", SERVER, "Log a line for every request."),
) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's APIs and a chat page, with these defaults."""
    try:
        from dflash_mlx.serve.auth import Auth
        from dflash_mlx.serve.server import listen
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(f"{error.name} is not installed", "serve") from error
    auth = Auth(
        access.host,
        _keys(access),
        frozenset(name.lower() for name in access.allow_host or ()),
        frozenset(origin.lower().rstrip("/") for origin in access.allow_origin or ()),
        access.no_auth,
    )
    every = _names(model or [options.EMBEDDED], draft, adapter or [], load, machines)
    listening = partial(listen, access.host, access.port)
    if runs_elsewhere(machines, every[0], weights, context, listening):
        return
    _log(verbose)
    with (
        inherited_socket(context) or listening() as socket,  # a taken port fails first
        _serving(socket, auth, load) as (server, metrics, over),
    ):
        member = cluster_member(context)
        loader = ModelLoader(weights, drafting, settings, given(context), load, metrics, member)
        pair, handler = loader.open(every[0], warm=True)
        models = _start(server, every, loader, handler, auth)
        if member is not None:
            member.end = partial(_give_up, handler, server)
            member.tell(READY)
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"{pair.title}: http://{shown}:{port}  (also /v1, /health, /metrics; Ctrl-C stops)")
        note("Open it in a browser to chat.")
        note_toy(context)
        with signals_to(partial(_end, server, over, load.drain_seconds)):
            over.result()
            for handler in models.handlers:
                handler.close()


@dataclass(frozen=True)
class ModelLoader:
    """Loads models as the options say, and starts their engines.

    Attributes:
        settings: defaults of requests.
        chosen: names of those that win over the publisher's.
        member: this machine among several that share the model.
    """

    weights: options.Weights
    drafting: options.Drafting
    settings: dict[str, Any]
    chosen: set[str]
    load: Load
    metrics: Metrics
    member: Cluster | None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """All engines use the device in one thread."""
        from dflash_mlx.engine.engine import device_thread

        return device_thread()

    def open(
        self, names: options.Names, warm: bool = False, reserved: int = 0
    ) -> tuple[Pair, RequestHandler]:
        """Load a model beside `reserved` bytes of others; `warm` as in `open_pair`."""
        pair = open_pair(
            *(names, self.weights, self.drafting, self.settings, warm, self.member),
            reserved=reserved,
            wire=self.load.wire,
        )
        from dflash_mlx.serve.handler import RequestHandler

        settings = without_template(self.settings) | published(pair.target, self.chosen)
        settings["tree_budget"] = self.settings["tree_budget"] if pair.policy is None else None
        settings["chat_template_kwargs"] = template_variables(pair.target, self.settings)
        load = self.load
        engine = dflash_mlx.Engine(
            pair.target,
            pair.drafter,
            policy=pair.policy,
            prefix=_prefix(pair, load),
            memory=_bytes(load.memory, CACHES),
            most_jobs=load.concurrency,
            thread=self._thread,
        )
        capacity = load.concurrency + load.queue
        return pair, RequestHandler(pair.target, engine, settings, capacity, self.metrics)


def _names(
    models: list[str], draft: str | None, adapters: list[str], load: Load, machines: Machines
) -> list[options.Names]:
    """Each model with its drafter, then the first with each adapter.

    Raises `SettingsError`, `ModelNotFoundError`.
    """
    several = len(models) + len(adapters) > 1
    if adapters and len(models) > 1:
        raise SettingsError("--adapter is a LoRA of one model: give one --model.")
    shared = machines.hosts is not None or rank() is not None
    if shared and (several or load.idle is not None):
        raise SettingsError("--hosts keeps one model loaded: give one --model, and no --idle.")
    if len(models) > 1 and draft not in (None, LOOKUP, NONE):
        raise SettingsError("--draft of several models is lookup or none; known ones are found.")
    names = list(map(short, [*models, *adapters]))
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"Two models are called {twice[0]}: give it once, or rename a folder.")
    for name in models if several else ():  # one of them may be loaded hours later
        local_path(name)
    tuned = [options.Names(models[0], draft, one) for one in adapters]
    return [*(options.Names(name, draft) for name in models), *tuned]


def _start(
    server: APIServer,
    every: list[options.Names],
    loader: ModelLoader,
    handler: RequestHandler,
    auth: Auth,
) -> Models:
    """Answer requests: the first model is loaded, the others will be."""
    from dflash_mlx.serve.app import make_app
    from dflash_mlx.serve.models import Models, OfferedModel

    def later(names: options.Names) -> Callable[[int], RequestHandler]:
        return lambda reserved: loader.open(names, reserved=reserved)[1]

    offered = [
        OfferedModel(
            *(short(one.adapter or one.model), later(one), None),
            *((one.adapter or one.model,), _local_copy(one.model)),
        )
        for one in every
    ]
    offered[0].handler = handler
    models = Models(offered, None if loader.load.idle is None else 60 * loader.load.idle)
    server.set_app(make_app(models, auth, loader.metrics), models)
    return models


def _local_copy(name: str) -> Path | None:
    """The folder or GGUF file of a model on this disk."""
    with suppress(DFlashError):
        return find(name, Hub(offline=True)).path
    return None


@contextmanager
def _serving(
    socket: Any, auth: Auth, load: Load
) -> Iterator[tuple[APIServer, Metrics, Future[None]]]:
    """A server in its own thread, which answers 503 while the model loads.

    Loading stays in the main thread, where Ctrl-C ends it.
    """
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.server import APIServer, make_loading_app

    metrics = Metrics()
    server = APIServer(make_loading_app(auth, metrics), load.drain_seconds)
    with ThreadPoolExecutor(1, "dflash-http") as threads:
        over = threads.submit(server.run, sockets=[socket])
        try:
            yield server, metrics, over
        finally:
            if not over.done():  # loading failed, or was interrupted
                server.stop()


def _give_up(handler: RequestHandler, server: APIServer, error: DFlashError) -> None:
    """Tell clients that the machines have lost each other, and end the process."""
    handler.give_up(error)
    last = threading.Timer(LAST_SECONDS, server.stop)
    last.daemon = True
    last.start()


def _end(
    server: APIServer, over: Future[None], seconds: float, number: int, frame: FrameType | None
) -> None:
    """On SIGTERM and SIGINT, stop the server; the process then ends with exit code 0."""
    if over.done():  # the engine does not stop
        os._exit(0)
    if server.busy:
        note(f"Finishing open answers for at most {seconds:g} s; Ctrl-C again stops at once.")
    server.stop()


def _prefix(pair: Pair, load: Load) -> PrefixStore | None:
    """The cache of prompt prefixes that requests share."""
    if load.prefix_cache == 0:
        return None
    memory = _bytes(load.prefix_cache, PREFIXES)
    store: type[PrefixStore] = dflash_mlx.PrefixStore
    if pair.member is not None:
        from dflash_mlx.cluster.target import LeaderPrefixStore as store
    disk, left = int(load.cache_disk * 1e9), int(load.disk_left * 1e9)
    return store(
        pair.target,
        pair.drafter,
        memory=memory,
        folder=load.cache_dir,
        disk=disk,
        disk_left=left,
    )


def _bytes(given: float | None, share: float) -> int:
    """A limit in bytes: as given in GB, or a share of what loaded weights leave of the memory."""
    if given is not None:
        return int(given * 1e9)
    import mlx.core as mx

    return max(1, int(share * (usable_bytes() - mx.get_active_memory())))


def _log(verbose: bool) -> None:
    """Log to stderr; requests, without their content, only if `verbose`."""
    logging.disable(logging.NOTSET)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("dflash_mlx.serve").setLevel(logging.INFO if verbose else logging.WARNING)


def _keys(access: Access) -> frozenset[str]:
    """The API keys. Raises `SettingsError` for empty ones, `OutputError` for an unreadable file."""
    keys = set(access.api_key or ())
    if access.api_key_file is not None:
        path = user_path(access.api_key_file)
        with ErrorWrapper(OutputError, f"{path}: the keys cannot be read", (OSError, UnicodeError)):
            lines = list(map(str.strip, path.read_text("utf-8").splitlines()))
        keys |= {line for line in lines if line and not line.startswith("#")} or {""}
    if "" in keys:
        raise SettingsError("An API key is empty: give a key, or a file with one in each line.")
    return frozenset(keys)
