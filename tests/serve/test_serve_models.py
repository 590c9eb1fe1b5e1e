"""Several models in one server: loaded on first use, unloaded when idle or to make room."""

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


class OfferedModels:
    """Models of a server whose memory holds at most `room` of them.

    Their engines come from `make`. By default they are fake, and their answers never end.

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
    """Short names, those of the command line, and Ollama's tags. Unknown names are 404."""
    server_models = OfferedModels("a", "b", make=lambda name: FakeEngine(make_target()))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(b"...")
    server_models.models.offered[0].path = tmp_path
    server_models.models.offered[1].path = tmp_path / "gone"
    app = make_app(server_models.models, Auth(), Metrics())
    with TestClient(app, "http://127.0.0.1:8000") as server:
        assert len(server.get("/api/tags").json()["models"]) == 2
        assert len(server.get("/api/ps").json()["models"]) == 0
        assert server_models.loads == []
        (unloaded, _) = server.get("/api/tags").json()["models"]
        assert unloaded["size"] == 3 and unloaded["details"]["family"] == "qwen3"
        for name, answers in (("b:latest", "b"), ("/b", "b"), ("", "a")):
            said = server.post(CHAT, json={"model": name, "messages": HI}).json()
            assert said["model"] == answers
        said = server.post("/api/chat", json={"model": "b:latest", "messages": HI, "stream": False})
        assert said.json()["model"] == "b" and server_models.loads == ["b", "a"]
        for path in (CHAT, "/v1/messages", "/api/chat"):
            body = {"model": "c", "messages": HI, "max_tokens": 1}
            refused = server.post(path, json=body)
            assert refused.status_code == 404 and "a, b" in refused.text
        assert server.get("/v1/models/c").status_code == 404
        states = [item["state"] for item in server.get("/v1/models").json()["data"]]
        assert states == ["loaded", "loaded"] and server_models.loads == ["b", "a"]
        told = server.post("/api/generate", json={"model": "a", "keep_alive": 0}).json()
        assert told["done_reason"] == "unload" and server_models.loaded() == ["b"]


async def test_idle_models_are_unloaded_and_busy_ones_are_not():
    server_models = OfferedModels("a", "b", idle=60)
    stream = await server_models.start("a")
    (await server_models.start("b")).close()
    for server_models.clock.seconds in (59, 61, 200):
        await server_models.models.unload_idle()
    assert server_models.loaded() == ["a"]  # its answer goes on
    stream.close()
    for server_models.clock.seconds, left in ((259, ["a"]), (261, [])):
        await server_models.models.unload_idle()
        assert server_models.loaded() == left
    await server_models.start("a")
    assert server_models.loads == ["a", "b", "a"]


async def test_a_model_waits_for_the_memory_of_another_and_both_take_turns():
    server_models = OfferedModels("a", "b", room=1)
    first = await server_models.start("a")
    other = asyncio.create_task(server_models.start("b"))
    while not server_models.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    again = asyncio.create_task(server_models.start("a"))
    await asyncio.sleep(0)
    assert server_models.loaded() == ["a"] and not other.done() and not again.done()
    first.close()
    (await other).close()
    assert server_models.loaded() == ["b"]
    (await again).close()
    assert server_models.loads == ["a", "b", "a"]


async def test_a_model_answers_while_another_loads():
    """An answer that has ended does not keep its model in memory, even if nobody has read it."""
    server_models = OfferedModels("a", "b", "c", room=2)
    opened = threading.Event()
    server_models.make = lambda name: FakeEngine(make_target())
    plain = server_models.models.offered[1].load
    server_models.models.offered[1].load = lambda bytes: opened.wait(30) and plain(bytes)
    unread = await server_models.start("a")  # its answer ends, and nobody reads it
    loading = asyncio.create_task(server_models.start("b"))
    (await server_models.start("a")).close()
    assert not loading.done()
    opened.set()
    await loading
    server_models.make = lambda name: FakeEngine(make_target(), reason=None)
    await server_models.start("c")
    assert server_models.loaded() == ["b", "c"]
    text = "".join([step.event.text async for step in unread.steps()])
    assert text == "Hello world"  # the answer can still be read, although its model is unloaded


async def test_a_request_is_refused_if_the_server_stops_while_its_model_loads():
    server_models = OfferedModels("a")
    opened = threading.Event()
    plain = server_models.models.offered[0].load
    server_models.models.offered[0].load = lambda bytes: opened.wait(30) and plain(bytes)
    loading = asyncio.create_task(server_models.start("a"))
    while not server_models.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    server_models.models.drain()
    opened.set()
    with pytest.raises(RequestError, match="shutting down"):
        await loading


async def test_a_model_waits_only_for_the_one_whose_memory_it_takes():
    server_models = OfferedModels("a", "b", "c", room=2)
    server_models.clock.seconds = 1
    first = await server_models.start("a")
    server_models.clock.seconds = 2
    (await server_models.start("b")).close()
    waiting = asyncio.create_task(server_models.start("c"))
    while not server_models.models.offered[0].lock.locked():
        await asyncio.sleep(0)
    (await server_models.start("b")).close()
    assert not waiting.done()
    first.close()
    (await waiting).close()
    assert server_models.loaded() == ["b", "c"]


@pytest.mark.parametrize(("error", "status"), [(NotEnoughMemoryError, 503), (WeightsError, 500)])
def test_a_model_that_cannot_be_loaded_is_an_error_without_paths(error, status, caplog):
    """The client does not see paths of the server, but its log has a line with them."""

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
    """Memory of the model, its drafter and its answers is free after it is unloaded.

    Models are loaded as in `serve`. Each is unloaded while the other is loaded.
    """
    settings = {"max_tokens": 12, "think": None, "reasoning_effort": None, "tree_budget": None}
    load = Load(memory=0.1, prefix_cache=0.01)
    loader = ModelLoader(Weights(), Drafting(), settings, set(), load, Metrics(), None)

    def offered(name):
        model = str(save_target(tmp_path / name))
        drafter = str(save_drafter(tmp_path / f"{name}-draft")) if draft == "a drafter" else draft
        names = Names(model, drafter)
        return OfferedModel(name, lambda reserved: loader.open(names, reserved=reserved)[1])

    gc.unfreeze()  # tests/conftest.py has excluded imported modules from garbage collection
    models = Models([offered("a"), offered("b")])

    async def answer(name):
        """Let a model answer; return weak references to all objects that it used."""
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
    """Each gets the text that its request has alone, and idle models leave no memory in use."""
    families = {"a": "qwen3", "b": "gpt_oss"}
    settings = {"max_tokens": 12}
    thread = device_thread()

    def make(name):
        target = tiny_target.__wrapped__(families[name])
        prefix = dm.PrefixStore(target, None, memory=2**24)
        engine = dm.Engine(target, None, prefix=prefix, thread=thread)
        engine.target = target
        return engine

    async def ask(server_models, name, number):
        _, handler = await server_models.models.use(name)
        wanted = GenerationRequest(name, f"Hello {number} times {number}", settings)
        stream = await handler.start([wanted])
        return "".join([step.event.text async for step in stream.steps()])

    async def two_rounds():
        """Ask all questions twice; between the rounds, the models are unloaded."""
        server_models = OfferedModels("a", "b", idle=60, make=make)
        before = active_memory()
        for _ in range(2):
            asked = [(name, number) for number in range(8) for name in families]
            texts = await asyncio.gather(*(ask(server_models, *request) for request in asked))
            yield dict(zip(asked, texts, strict=True))
            server_models.clock.seconds += 61
            await server_models.models.unload_idle()
            assert server_models.loaded() == [] and active_memory() - before < 2**16
        assert sorted(server_models.loads) == ["a", "a", "b", "b"]

    async def rounds():
        return [result async for result in two_rounds()]

    first, second = asyncio.run(rounds())
    assert first == second and len(set(first.values())) == 16
    for (name, number), text in first.items():
        if number < 2:
            prompt = f"Hello {number} times {number}"
            alone = dm.generate(tiny_target(families[name]), None, prompt, **settings)
            assert text == alone.text
