"""The server with a fake engine, called in this process (`client`) or on a socket (`running`)."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from starlette.testclient import TestClient
from transformers import AutoTokenizer

import dflash_mlx
from dflash_mlx.answers.families import FAMILIES
from dflash_mlx.engine.engine import EngineLoad
from dflash_mlx.events import Event, Stats
from dflash_mlx.serve.auth import Auth
from dflash_mlx.serve.handler import RequestHandler
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.serve.offered_models import Models, OfferedModel
from dflash_mlx.serve.server import APIServer, listen, make_loading_app
from dflash_mlx.serve.web_app import make_app
from dflash_mlx.stream import Detokenizer, TextStream, skip_text_start

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_target(
    family: str | None = None,
    template: str = CHATML,
    thinking: str | None = None,
    context: int = 2**20,
    added: Sequence[str] = (),
) -> Any:
    """A target of the embedded tokenizer, with the syntax of a family's tool calls.

    Args:
        family: the name of a family of ours, or of a module in mlx_lm.tool_parsers.
        template: the chat template.
        thinking: text after the generation prompt.
        added: tokens to add to the vocabulary.
    """
    markers = {}
    template_words = {
        answer_family.name: answer_family.template_words for answer_family in FAMILIES
    }
    words = template_words.get(family, ())
    if words:
        template = f"{{# {words} #}}{template}"
    elif family not in (None, "harmony"):
        parser = import_module(f"mlx_lm.tool_parsers.{family}")
        markers = {
            "tool_call_start": parser.tool_call_start,
            "tool_call_end": parser.tool_call_end,
            "tool_parser": parser.parse_tool_call,
        }
    tokenizer = AutoTokenizer.from_pretrained(f"{dflash_mlx.__path__[0]}/tiny/target")
    if thinking is not None:
        tokenizer.add_tokens(["<think>", "</think>"])
        template += "{% if add_generation_prompt %}" + thinking + "{% endif %}"
    tokenizer.add_tokens([*added])
    tokenizer.chat_template = template
    wrapper = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, [2], **markers)
    return SimpleNamespace(
        tokenizer=wrapper,
        vocab_size=len(tokenizer),
        context_length=context,
        name="told",
        model=nn.Linear(3, 2),
        hidden_size=3,
        config={"model_type": "llama", "quantization": {"bits": 4}},
    )


HEADERS = {
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"],
    "muse_spark": ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
}
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"


def target_of(family: str) -> Any:
    """A target with a family's chat template, whose markers are single tokens."""
    template = (TEMPLATES / f"{family}.jinja").read_text()
    header = HEADERS.get(family)
    return make_target(family, template, thinking=None if header else "", added=header or ())


@dataclass
class FakeJob:
    """A job with given events, then an end or an error."""

    events: Iterable[Event]
    error: Exception | None = None
    cancelled: bool = False
    waits: bool = False  # for its cancellation, after its events
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self):
        for event in self.events:
            await asyncio.sleep(0)
            if self.cancelled:
                return
            yield event
        if self.error is not None:
            raise self.error
        if self.waits and not self.cancelled:
            await self.leaving.wait()

    def cancel(self) -> None:
        self.cancelled = True
        self.leaving.set()


@dataclass
class FakeEngine:
    """An engine that answers every request with the same steps.

    Attributes:
        steps: the text of each step.
        reason: the finish reason; None for an answer that never ends.
        error: raised after the steps, instead of an end.
        submitted: (prompt, settings) of every job.
    """

    target: Any
    steps: Sequence[str] = ("Hello", " world")
    reason: str | None = "stop"
    error: Exception | None = None
    cached: int = 0
    progressed: float = 0.0
    busy: bool = False
    load: EngineLoad = EngineLoad(running=2, waiting=3, prefix_bytes=5)
    submitted: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    jobs: list[FakeJob] = field(default_factory=list)

    def submit(self, prompt, branches=(), **settings):
        self.submitted.append((list(prompt), settings))
        self.branches = list(branches)
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=self.cached)
        job = FakeJob(list(self._events(stats)), self.error, waits=self.reason is None)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        self.busy = False

    def _events(self, stats):
        last = len(self.steps) - 1
        ends = sorted(self.target.tokenizer.eos_token_ids)
        for number, text in enumerate(self.steps):
            tokens = self.target.tokenizer.encode(text, add_special_tokens=False)
            over = number == last and self.error is None and self.reason is not None
            tokens += ends[:1] if over and self.reason == "stop" else []
            stats.count_step(len(tokens), max(0, len(tokens) - 1), len(tokens))
            reason = self.reason if over else None
            yield Event(
                text,
                tokens=tokens,
                accepted=max(0, len(tokens) - 1),
                drafted=len(tokens),
                finish_reason=reason,
                stats=stats,
            )

    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.target.tokenizer.decode(self.submitted[-1][0])


class ToldEngine(FakeEngine):
    """An engine whose model generates `steps`, and that applies settings as the real one does.

    A logits processor may change a token, and a stop string ends the text.
    """

    def submit(self, prompt, branches=(), **settings):
        self.submitted.append((list(prompt), settings))
        self.branches = list(branches)
        job = FakeJob(list(self._generated(list(prompt), settings)))
        self.jobs.append(job)
        return job

    def _generated(self, history, settings):
        tokenizer = self.target.tokenizer
        detokenizer = Detokenizer(tokenizer)
        if settings.get("continues"):
            skip_text_start(detokenizer, tokenizer)
        stop = settings.get("stop") or ()
        applies = settings.get("stop_applies")
        text = TextStream(
            detokenizer,
            eos_ids=tokenizer.eos_token_ids,
            stop=stop,
            max_tokens=10**6,
            stop_applies=applies,
        )
        stats = Stats(prompt_tokens=len(history))
        tokens = tokenizer.encode("".join(self.steps), add_special_tokens=False)
        for token in [*tokens, *sorted(tokenizer.eos_token_ids)[:1]]:
            logits = 9.0 * (mx.arange(self.target.vocab_size) == token)[None]
            for processor in settings.get("logits_processors", ()):
                logits = processor(mx.array(history), logits)
            piece = text.add([logits.argmax().item()])
            history += piece.tokens
            stats.count_step(1, 0, 1)
            yield Event(
                piece.text,
                tokens=piece.tokens,
                accepted=0,
                drafted=1,
                finish_reason=piece.finish_reason,
                stats=stats,
            )
            if piece.finish_reason:
                return


def make_handler(engine: Any, capacity: int = 64, defaults: Any = None) -> RequestHandler:
    """The handler of a server with this engine."""
    return RequestHandler(
        engine.target, engine=engine, defaults=defaults or {}, capacity=capacity, metrics=Metrics()
    )


def models_of(handler: RequestHandler, name: str = "fake") -> Models:
    """The models of a server with one model."""
    return Models([OfferedModel(name, handler=handler)])


def client(engine: Any, capacity: int = 64, defaults: Any = None, auth: Any = None) -> TestClient:
    """A client of the application, in this process."""
    handler = make_handler(engine, capacity, defaults)
    app = make_app(models_of(handler), auth or Auth(), handler.metrics)
    return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)


def post(engine: Any, path: str, body: Any, defaults: Any = None) -> Any:
    """The response to one request."""
    with client(engine, defaults=defaults) as server:
        return server.post(path, json=body)


def frames(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    lines = (line for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@asynccontextmanager
async def running(engine, loaded=True, drain_seconds=0.05, others=()):
    """A server in this event loop. Unless `loaded`, its model is still loading.

    `others` are further models that it offers.
    """
    handler = make_handler(engine)
    server = APIServer(make_loading_app(Auth(), handler.metrics), drain_seconds)
    if loaded:
        models = models_of(handler)
        models.offered += others
        server.set_app(make_app(models, Auth(), handler.metrics), models)
    bound = listen("127.0.0.1", 0)
    server.port = bound.getsockname()[1]
    server.handler = handler
    server.task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield server
    finally:
        server.stop()
        server.stop()
        await server.task
