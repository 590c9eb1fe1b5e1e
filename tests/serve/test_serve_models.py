"""Several models in one server: loaded on first use, unloaded when idle or for another's memory."""

import asyncio
import gc
import threading
import weakref

import mlx.core as mx
import pytest
from serving import FakeEngine, make_target
from starlette.testclient import TestClient
from tinymodels import save_drafter, save_target
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.cli.options import Drafting, Names, Weights
from dflash_mlx.cli.serve import Load, ModelLoader
from dflash_mlx.engine.engine import device_thread
from dflash_mlx.errors import NotEnoughMemoryError, WeightsError
from dflash_mlx.serve.auth import Auth
from dflash_mlx.serve.generation_request import GenerationRequest
from dflash_mlx.serve.handler import RequestHandler
from dflash_mlx.serve.http_errors import RequestError
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.serve.offered_models import Models, OfferedModel
from dflash_mlx.serve.web_app import make_app

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


class Shelf:
    """Models that share a memory for `room` of them: those of `make`, or fake, endless ones.

    Attributes:
        loads: the names that were loaded, in order.
    """

    def __init__(self, *names, room=9, idle=None, make=None):
        self.loads = []
        self.room = room
        self.clock = Clock()
        self.make = make or (lambda name: FakeEngine(make_target(), reason=None))
        offered = [OfferedModel(name, self.loader(name), aliases=(f"/{name}",)) for name in names]
        self.models = Models(offered, idle, self.clock)

    def loader(self, name):
        def load(reserved):
            if len(self.models.handlers) >= self.room:
                raise NotEnoughMemoryError("too large")
            self.loads.append(name)
            engine = self.make(name)
            return RequestHandler(
                engine.target, engine=engine, defaults={}, capacity=64, metrics=Metrics()
            )

        return load

    def loaded(self):
        return [model.name for model in self.models.offered if model.handler]

    async def start(self, name, **settings):
        _, handler = await self.models.use(name)
        return await handler.start([GenerationRequest(name, "Hi", settings)])


def test_models_answer_to_each_of_their_names(tmp_path):
    """Short ones, those of the command line, and Ollama's tags; others are 404 by all APIs."""
    shelf = Shelf("a", "b", make=lambda name: FakeEngine(make_target()))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(b"...")
    shelf.models.offered[0].path = tmp_path
    shelf.models.offered[1].path = tmp_path / "gone"
    app = make_app(shelf.models, Auth(), Metrics())
    with TestClient(app, "http://127.0.0.1:8000") as server:
        lists = ("/v1/models", "/api/tags", "/api/ps")
        shown = [len(next(iter(server.get(path).json().values()))) for path in lists[1:]]
        assert shown == [2, 0] and shelf.loads == []
        (unloaded, _) = server.get("/api/tags").json()["models"]
        assert unloaded["size"] == 3 and unloaded["details"]["family"] == "qwen3"
        for name, answers in (("b:latest", "b"), ("/b", "b"), ("", "a")):
            said = server.post(CHAT, json={"model": name, "messages": HI}).json()
            assert said["model"] == answers
        said = server.post("/api/chat", json={"model": "b:latest", "messages": HI, "stream": False})
        assert said.json()["model"] == "b" and shelf.loads == ["b", "a"]
        for path in (CHAT, "/v1/messages", "/api/chat"):
            body = {"model": "c", "messages": HI, "max_tokens": 1}
            refused = server.post(path, json=body)
            assert refused.status_code == 404 and "a, b" in refused.text
        assert server.get("/v1/models/c").status_code == 404
        states = [item["state"] for item in server.get("/v1/models").json()["data"]]
        assert states == ["loaded", "loaded"] and shelf.loads == ["b", "a"]
        told = server.post("/api/generate", json={"model": "a", "keep_alive": 0}).json()
        assert told["done_reason"] == "unload" and shelf.loaded() == ["b"]


async def test_idle_models_are_unloaded_and_busy_ones_are_not():
    shelf = Shelf("a", "b", idle=60)
    stream = await shelf.start("a")
    (await shelf.start("b")).close()
    for shelf.clock.seconds in (59, 61, 200):
        await shelf.models.unload_idle()
    assert shelf.loaded() == ["a"]  # its answer goes on
    stream.close()
    for shelf.clock.seconds, left in ((259, ["a"]), (261, [])):
        await shelf.models.unload_idle()
        assert shelf.loaded() == left
    await shelf.start("a")
    assert shelf.loads == ["a", "b", "a"]


async def test_a_model_waits_for_the_memory_of_another_and_both_take_turns():
    shelf = Shelf("a", "b", room=1)
    first = await shelf.start("a")
    other = asyncio.create_task(shelf.start("b"))
    while not shelf.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    again = asyncio.create_task(shelf.start("a"))
    await asyncio.sleep(0)
    assert shelf.loaded() == ["a"] and not other.done() and not again.done()
    first.close()
    (await other).close()
    assert shelf.loaded() == ["b"]
    (await again).close()
    assert shelf.loads == ["a", "b", "a"]


async def test_a_model_answers_while_another_loads():
    """An answer that has ended does not keep its model in memory, even if nobody has read it."""

    shelf = Shelf("a", "b", "c", room=2)
    opened = threading.Event()
    shelf.make = lambda name: FakeEngine(make_target())
    plain = shelf.models.offered[1].load
    shelf.models.offered[1].load = lambda bytes: opened.wait(30) and plain(bytes)
    unread = await shelf.start("a")  # its answer ends, and nobody reads it
    loading = asyncio.create_task(shelf.start("b"))
    (await shelf.start("a")).close()
    assert not loading.done()
    opened.set()
    await loading
    shelf.make = lambda name: FakeEngine(make_target(), reason=None)
    await shelf.start("c")
    assert shelf.loaded() == ["b", "c"]
    text = "".join([step.event.text async for step in unread.steps()])
    assert text == "Hello world"  # what was said is there, the model is not


async def test_a_request_is_refused_if_the_server_stops_while_its_model_loads():
    shelf = Shelf("a")
    opened = threading.Event()
    plain = shelf.models.offered[0].load
    shelf.models.offered[0].load = lambda bytes: opened.wait(30) and plain(bytes)
    loading = asyncio.create_task(shelf.start("a"))
    while not shelf.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    shelf.models.drain()
    opened.set()
    with pytest.raises(RequestError, match="shutting down"):
        await loading


async def test_a_model_waits_only_for_the_one_whose_memory_it_takes():
    shelf = Shelf("a", "b", "c", room=2)
    shelf.clock.seconds = 1
    first = await shelf.start("a")
    shelf.clock.seconds = 2
    (await shelf.start("b")).close()
    waiting = asyncio.create_task(shelf.start("c"))
    while not shelf.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    (await shelf.start("b")).close()
    assert not waiting.done()
    first.close()
    (await waiting).close()
    assert shelf.loaded() == ["b", "c"]


@pytest.mark.parametrize(("error", "status"), [(NotEnoughMemoryError, 503), (WeightsError, 500)])
def test_a_model_that_cannot_be_loaded_is_an_error_without_paths(error, status, caplog):
    """The client is told no path of the server, whose log has one line with it."""

    def load(reserved):
        raise error("/home/me/a is gone")

    models = Models([OfferedModel("a", load)])
    for _ in range(2):
        with pytest.raises(RequestError, match="^a ") as refused:
            asyncio.run(models.use("a"))
        assert refused.value.status == status and "/home" not in str(refused.value)
    assert [record.getMessage() for record in caplog.records] == [
        "a cannot be loaded: /home/me/a is gone"
    ] * 2
    assert not any(record.exc_info for record in caplog.records)


def active_memory():
    """Bytes in use, garbage and unused buffers left out."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("draft", ["a drafter", "lookup", "none"])
async def test_an_unloaded_model_is_freed_at_once(tmp_path, draft):
    """Loaded as `serve` does: the model, its drafter and all that its answers made.

    The first model is unloaded after the second was loaded, and the second while the first is back.
    """
    settings = {"max_tokens": 12, "think": None, "reasoning_effort": None, "tree_budget": None}
    load = Load(memory=0.1, prefix_cache=0.01)
    loader = ModelLoader(Weights(), Drafting(), settings, set(), load, Metrics(), None)

    def offered(name):
        model = str(save_target(tmp_path / name))
        drafter = str(save_drafter(tmp_path / f"{name}-draft")) if draft == "a drafter" else draft
        names = Names(model, drafter)
        return OfferedModel(name, lambda reserved: loader.open(names, reserved=reserved)[1])

    gc.unfreeze()  # as a process begins: `tests/conftest.py` has frozen what was imported
    models = Models([offered("a"), offered("b")])

    async def answer(name):
        """What an answer used, without a reference that keeps it."""
        _, handler = await models.use(name)
        stream = await handler.start([GenerationRequest(name, "Hi", {})])
        tokens = [token async for step in stream.steps() for token in step.event.tokens]
        assert len(tokens) == 12
        target, drafter = handler._engine._pair
        used = [handler, handler._engine, target, target.model, drafter]
        return [weakref.ref(part) for part in used if part is not None]

    before = active_memory()
    for unloaded, kept in (("a", "b"), ("b", "a")):
        parts = await answer(unloaded)
        await answer(kept)
        assert await models.unload(unloaded)
        assert [part() for part in parts] == [None] * len(parts)
    assert await models.unload("a")
    assert active_memory() - before < 2**16


def test_eight_clients_on_each_of_two_models():
    """Each has the text of a request alone, and all memory is free once the models are idle."""
    families = {"a": "qwen3", "b": "gpt_oss"}
    settings = {"max_tokens": 12}
    thread = device_thread()

    def make(name):
        target = tiny_target.__wrapped__(families[name])
        prefix = dm.PrefixStore(target, None, memory=2**24)
        engine = dm.Engine(target, None, prefix=prefix, thread=thread)
        engine.target = target
        return engine

    async def ask(shelf, name, number):
        _, handler = await shelf.models.use(name)
        wanted = GenerationRequest(name, f"Hello {number} times {number}", settings)
        stream = await handler.start([wanted])
        return "".join([step.event.text async for step in stream.steps()])

    async def play():
        shelf = Shelf("a", "b", idle=60, make=make)
        before = active_memory()
        for _ in range(2):
            asked = [(name, number) for number in range(8) for name in families]
            texts = await asyncio.gather(*(ask(shelf, *request) for request in asked))
            yield dict(zip(asked, texts, strict=True))
            shelf.clock.seconds += 61
            await shelf.models.unload_idle()
            assert shelf.loaded() == [] and active_memory() - before < 2**16
        assert sorted(shelf.loads) == ["a", "a", "b", "b"]

    async def rounds():
        return [result async for result in play()]

    first, second = asyncio.run(rounds())
    assert first == second and len(set(first.values())) == 16
    for (name, number), text in first.items():
        if number < 2:
            prompt = f"Hello {number} times {number}"
            alone = dm.generate(tiny_target(families[name]), None, prompt, **settings)
            assert text == alone.text
