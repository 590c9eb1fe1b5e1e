"""`dflash-mlx serve`: serves models with the HTTP APIs of OpenAI, Anthropic and Ollama."""

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
from .serve_options import SERVER, Access, Load

if TYPE_CHECKING:
    from dflash_mlx import PrefixStore
    from dflash_mlx.cluster.cluster import Cluster
    from dflash_mlx.serve.auth import Auth
    from dflash_mlx.serve.handler import RequestHandler
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.offered_models import Models
    from dflash_mlx.serve.server import APIServer

MODELS = "Folder, GGUF, hub name, smollm2 or tiny. Repeatable."
# Shares of the memory that the weights leave. Caches include prefixes.
CACHES_SHARE = 0.8
PREFIXES_SHARE = 0.25
LAST_SECONDS: Final = 2.0  # for clients to learn that the machines lost each other
DEFAULTS = options.settings(max_tokens=options.MAX_TOKENS)
del DEFAULTS["stop"]  # only requests set it


def serve(
    context: typer.Context,
    *,
    model: list[str] | None = options.model(None, MODELS),
    draft: str | None = options.DRAFT,
    adapter: list[str] | None = option(
        None,
        panel=MODEL,
        metavar="PATH",
        help="LoRA adapter, served under its own name. Repeatable.",
    ),
    drafting: options.Drafting,
    weights: options.Weights,
    access: Access,
    load: Load,
    settings: dict[str, Any] = DEFAULTS,
    machines: Machines,
    verbose: bool = flag("--verbose", panel=SERVER, help="Log a line for every request."),
) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's APIs and a chat page, with these defaults."""
    try:
        from dflash_mlx.serve.server import listen
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(f"{error.name} is not installed", "serve") from error
    auth = _auth(access)
    all_names = _all_names(
        model or [options.EMBEDDED],
        draft=draft,
        adapters=adapter or [],
        load=load,
        machines=machines,
    )
    bind = partial(listen, access.host, access.port)
    if runs_elsewhere(
        machines,
        names=all_names[0],
        weights=weights,
        context=context,
        listen=bind,
    ):
        return
    _configure_log(verbose)
    with (
        inherited_socket(context) or bind() as socket,  # a port in use fails before loading
        _serving(socket, auth, load) as (server, metrics, server_end),
    ):
        member = cluster_member(context)
        loader = ModelLoader(
            weights=weights,
            drafting=drafting,
            settings=settings,
            chosen=given(context),
            load=load,
            metrics=metrics,
            member=member,
        )
        pair, handler = loader.open(all_names[0], warm=True)
        models = _start(server, all_names=all_names, loader=loader, handler=handler, auth=auth)
        if member is not None:
            member.end = partial(_give_up, handler, server)
            member.tell(READY)
        note(f"{pair.title}: {_url(socket)}  (also /v1, /health, /metrics; Ctrl-C stops)")
        note("Open it in a browser to chat.")
        note_toy(context)
        with signals_to(partial(_end, server, server_end, load.drain_seconds)):
            server_end.result()
            for handler in models.handlers:
                handler.close()


@dataclass(frozen=True)
class ModelLoader:
    """Loads models as the options say, and starts their engines.

    Attributes:
        weights: how weights are loaded.
        drafting: whether to draft, and how many tokens.
        settings: defaults of requests.
        chosen: the names of settings that win over the publisher's.
        load: limits of the server.
        metrics: counts the answers.
        member: this machine among several that share the model; None if it is alone.
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
        """The thread in which all engines use the device."""
        from dflash_mlx.engine.engine import device_thread

        return device_thread()

    def open(
        self, names: options.Names, warm: bool = False, reserved: int = 0
    ) -> tuple[Pair, RequestHandler]:
        """Load a model and start its engine.

        Args:
            names: the model, the drafter and the adapter.
            warm: whether to run a few steps first.
            reserved: bytes of memory that other models take.
        """
        pair = open_pair(
            names,
            self.weights,
            drafting=self.drafting,
            settings=self.settings,
            warm=warm,
            member=self.member,
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
            memory=_bytes(load.memory, CACHES_SHARE),
            most_jobs=load.concurrency,
            thread=self._thread,
        )
        handler = RequestHandler(
            pair.target,
            engine,
            defaults=settings,
            capacity=load.concurrency + load.queue,
            metrics=self.metrics,
        )
        return pair, handler


def _all_names(
    models: list[str], draft: str | None, adapters: list[str], load: Load, machines: Machines
) -> list[options.Names]:
    """Return the names of all served models: each model, then the first model with each adapter.

    Raises `SettingsError`, `ModelNotFoundError`.
    """
    has_several = len(models) + len(adapters) > 1
    if adapters and len(models) > 1:
        raise SettingsError("--adapter is a LoRA of one model: give one --model.")
    is_shared = machines.hosts is not None or rank() is not None
    if is_shared and (has_several or load.idle is not None):
        raise SettingsError("--hosts keeps one model loaded: give one --model, and no --idle.")
    if len(models) > 1 and draft not in (None, LOOKUP, NONE):
        raise SettingsError(
            "With several models, --draft is lookup or none; known drafters are found without it."
        )
    short_names = list(map(short, [*models, *adapters]))
    for name in short_names:
        if short_names.count(name) > 1:
            raise SettingsError(f"Two models are called {name}: give it once, or rename a folder.")
    if has_several:
        for name in models:
            local_path(name)  # raises now for a wrong name, not hours later when it is loaded
    names = [options.Names(name, draft) for name in models]
    names += [options.Names(models[0], draft, adapter) for adapter in adapters]
    return names


def _start(
    server: APIServer,
    all_names: list[options.Names],
    loader: ModelLoader,
    handler: RequestHandler,
    auth: Auth,
) -> Models:
    """Answer requests. The first model is loaded; the others are loaded by their first request."""
    from dflash_mlx.serve.offered_models import Models, OfferedModel
    from dflash_mlx.serve.web_app import make_app

    def load_later(names: options.Names) -> Callable[[int], RequestHandler]:
        def load(reserved: int) -> RequestHandler:
            _, handler = loader.open(names, reserved=reserved)
            return handler

        return load

    offered = []
    for names in all_names:
        full_name = names.adapter or names.model
        offered.append(
            OfferedModel(
                name=short(full_name),
                load=load_later(names),
                aliases=(full_name,),
                path=_local_copy(names.model),
            )
        )
    offered[0].handler = handler
    idle_minutes = loader.load.idle
    models = Models(offered, None if idle_minutes is None else 60 * idle_minutes)
    server.set_app(make_app(models, auth, loader.metrics), models)
    return models


def _local_copy(name: str) -> Path | None:
    """Return the folder or GGUF file of a model; None if it is not on this disk."""
    with suppress(DFlashError):
        return find(name, Hub(offline=True)).path
    return None


@contextmanager
def _serving(
    socket: Any, auth: Auth, load: Load
) -> Iterator[tuple[APIServer, Metrics, Future[None]]]:
    """Run a server in a new thread. It answers 503 while the model loads.

    Loading stays in the main thread, where Ctrl-C ends it.

    Yields the server, its metrics, and a future of its end.
    """
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.server import APIServer, make_loading_app

    metrics = Metrics()
    server = APIServer(make_loading_app(auth, metrics), load.drain_seconds)
    with ThreadPoolExecutor(1, "dflash-http") as threads:
        server_end = threads.submit(server.run, sockets=[socket])
        try:
            yield server, metrics, server_end
        finally:
            if not server_end.done():  # loading failed, or was interrupted
                server.stop()


def _give_up(handler: RequestHandler, server: APIServer, error: DFlashError) -> None:
    """Tell clients that the machines have lost each other, and end the process."""
    handler.give_up(error)
    timer = threading.Timer(LAST_SECONDS, server.stop)
    timer.daemon = True
    timer.start()


def _end(
    server: APIServer,
    server_end: Future[None],
    seconds: float,
    number: int,
    frame: FrameType | None,
) -> None:
    """Stop the server on SIGTERM and SIGINT. The process then ends with exit code 0."""
    if server_end.done():  # only an engine that does not stop keeps the process
        os._exit(0)
    if server.busy:
        note(f"Finishing open responses for at most {seconds:g} s; Ctrl-C again stops immediately.")
    server.stop()


def _prefix(pair: Pair, load: Load) -> PrefixStore | None:
    """Make the store of prompt prefixes that requests share; None if it is off."""
    if load.prefix_cache == 0:
        return None
    store: type[PrefixStore] = dflash_mlx.PrefixStore
    if pair.member is not None:
        from dflash_mlx.cluster.leader_target import LeaderPrefixStore as store
    return store(
        pair.target,
        pair.drafter,
        memory=_bytes(load.prefix_cache, PREFIXES_SHARE),
        folder=load.cache_dir,
        disk=int(load.cache_disk * 1e9),
        disk_left=int(load.disk_left * 1e9),
    )


def _bytes(gigabytes: float | None, share: float) -> int:
    """Return a limit in bytes; without one, a share of the memory that loaded weights leave."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    import mlx.core as mx

    return max(1, int(share * (usable_bytes() - mx.get_active_memory())))


def _configure_log(verbose: bool) -> None:
    """Log to stderr. Requests are logged only if `verbose`, and without their content."""
    logging.disable(logging.NOTSET)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("dflash_mlx.serve").setLevel(logging.INFO if verbose else logging.WARNING)


def _auth(access: Access) -> Auth:
    """Make the check of who may ask. Raises the errors of `Auth` and `_keys`."""
    from dflash_mlx.serve.auth import Auth

    return Auth(
        host=access.host,
        keys=_keys(access),
        hosts=frozenset(name.lower() for name in access.allow_host or ()),
        origins=frozenset(origin.lower().rstrip("/") for origin in access.allow_origin or ()),
        no_auth=access.no_auth,
    )


def _url(socket: Any) -> str:
    """Return the URL of a listening socket."""
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _keys(access: Access) -> frozenset[str]:
    """Return the API keys.

    Raises `SettingsError` for an empty key or file, and `OutputError` for an unreadable file.
    """
    keys = set(access.api_key or ())
    if access.api_key_file is not None:
        path = user_path(access.api_key_file)
        with ErrorWrapper(OutputError, f"{path}: the keys cannot be read", (OSError, UnicodeError)):
            lines = list(map(str.strip, path.read_text("utf-8").splitlines()))
        keys_in_file = {line for line in lines if line and not line.startswith("#")}
        keys |= keys_in_file or {""}
    if "" in keys:
        raise SettingsError("An API key is empty: give a key, or a file with one in each line.")
    return frozenset(keys)
