"""The application: which path is whose."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import chat_answers, completions, messages_answers, responses_answers
from .access import Access
from .answering import Answering
from .ask import Ask
from .body import Bounds, read_json
from .chat import ChatBody
from .completions import CompletionsBody
from .desk import Desk
from .errors import Refusal, of_validation
from .fields import Body
from .front import guarded
from .messages import CountBody, MessagesBody
from .metrics import CONTENT_TYPE
from .responses import ResponsesBody
from .sse import COMMENT, EventStream, unless_gone

STALLED_SECONDS: Final = 30.0

Asked = TypeVar("Asked", bound=Body)


@dataclass(frozen=True)
class Options:
    """What an application is told beside its desk.

    Attributes:
        name: of the model, for those who ask which there are.
        access: who may speak.
        bounds: of bodies.
        stalled_seconds: without a round, while there is something to do, until `/health` says so.
    """

    name: str
    access: Access
    bounds: Bounds = Bounds()
    stalled_seconds: float = STALLED_SECONDS


class Endpoints:
    """What the paths do."""

    def __init__(self, desk: Desk, options: Options) -> None:
        self._desk, self._options = desk, options
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await self._read(request, ChatBody)
        answering = await self._desk.ask(body.ask(), request.state.who)
        if body.stream:
            options = body.stream_options
            usage = bool(options and options.include_usage)
            frames = chat_answers.stream(answering, usage)
            return EventStream(frames, COMMENT, answering.leave)
        return await _whole(request, chat_answers.whole(answering), answering.leave)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        body = await self._read(request, CompletionsBody)
        asks = body.asks()
        self._desk.check_room(asks)
        opened: list[Answering] = []
        with ExitStack() as leaving:  # what is open when another prompt is refused
            for ask in asks:
                opened.append(await self._desk.ask(ask, request.state.who))
                leaving.callback(opened[-1].leave)
            texts = await asyncio.to_thread(self._texts, asks)
            leaving.pop_all()
        answers = completions.Answers(body, opened, texts)
        if body.stream:
            return EventStream(answers.stream(), COMMENT, answers.leave)
        return await _whole(request, answers.whole(), answers.leave)

    def _texts(self, asks: Sequence[Ask]) -> list[str]:
        """What prompts say."""
        tokenizer = self._desk.target.tokenizer
        prompts = (ask.prompt for ask in asks)
        return [one if isinstance(one, str) else tokenizer.decode(one) for one in prompts]

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses."""
        body = await self._read(request, ResponsesBody)
        answering = await self._desk.ask(body.ask(), request.state.who)
        answers = responses_answers.Answers(body, answering)
        if body.stream:
            return EventStream(answers.stream(), COMMENT, answering.leave)
        return await _whole(request, answers.whole(), answering.leave)

    async def no_response(self, request: Request) -> Response:
        """A response of the past: nothing is kept."""
        raise Refusal("Responses are not stored here: send the conversation whole.", 404)

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        body = await self._read(request, MessagesBody)
        answering = await self._desk.ask(body.ask(), request.state.who)
        if body.stream:
            frames = messages_answers.stream(answering, request.state.request_id)
            return EventStream(frames, messages_answers.PING, answering.leave)
        return await _whole(request, messages_answers.whole(answering), answering.leave)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a prompt would have."""
        body = await self._read(request, CountBody)
        encoded = await self._desk.encode(body.ask())
        return JSONResponse({"input_tokens": len(encoded.ids)})

    async def models(self, request: Request) -> Response:
        """The one model that there is."""
        model = self._model()
        content = {"object": "list", "data": [model], "has_more": False}
        return JSONResponse(content | {"first_id": model["id"], "last_id": model["id"]})

    async def model(self, request: Request) -> Response:
        """A model by its name."""
        if request.path_params["name"] != self._options.name:
            raise Refusal(
                f"There is one model here, {self._options.name}; it answers whatever model a "
                "request names.",
                404,
                code="model_not_found",
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        """In the words of both dialects."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
        length = self._desk.target.context_length
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._started,
            "owned_by": "dflash-mlx",
            "type": "model",
            "display_name": self._options.name,
            "created_at": created,
            "context_length": length,
            "max_model_len": length,
        }

    async def health(self, request: Request) -> Response:
        """Whether rounds go on; a thread that lives proves nothing."""
        still = self._desk.still
        stalled = self._desk.lost or still > self._options.stalled_seconds
        content = {"status": "stalled" if stalled else "ok", "seconds_since_round": round(still, 3)}
        return JSONResponse(content, 503 if stalled else 200)

    async def ready(self, request: Request) -> Response:
        """Whether new requests are taken in."""
        draining = self._desk.draining
        return JSONResponse({"ready": not draining}, 503 if draining else 200)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        metrics = self._desk.metrics
        metrics.since_round.set(self._desk.still)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def _read(self, request: Request, kind: type[Asked]) -> Asked:
        content = await read_json(request, self._options.bounds)
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            raise of_validation(error) from error


async def _whole(
    request: Request,
    answer: Coroutine[Any, Any, dict[str, Any]],
    leave: Callable[[], None],
) -> Response:
    """The answer at once; whoever leaves before ends it."""
    try:
        return JSONResponse(await unless_gone(request, answer))
    finally:
        leave()


class Page:
    """The page, and what a browser may do with it: run its own script, ask its own server."""

    def __init__(self) -> None:
        self._html = files(__package__).joinpath("page", "index.html").read_text("utf-8")
        script, style = (self._hashes(tag) for tag in ("script", "style"))
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def _hashes(self, tag: str) -> str:
        """What a policy says of the page's own scripts or styles."""
        found = re.findall(f"<{tag}>(.*?)</{tag}>", self._html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in found)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests) or "'none'"

    async def show(self, request: Request) -> Response:
        """It."""
        return Response(self._html, media_type="text/html; charset=utf-8", headers=self._headers)


Handler = Callable[[Request], Awaitable[Response]]


def make_app(desk: Desk, options: Options) -> Starlette:
    """The application of one server."""
    ends = Endpoints(desk, options)
    of_dialects: list[tuple[str, str, Handler]] = [
        ("POST", "/chat/completions", ends.chat),
        ("POST", "/completions", ends.completions),
        ("POST", "/responses", ends.responses),
        ("GET", "/responses/{id}", ends.no_response),
        ("DELETE", "/responses/{id}", ends.no_response),
        ("POST", "/responses/{id}/cancel", ends.no_response),
        ("POST", "/messages", ends.messages),
        ("POST", "/messages/count_tokens", ends.count_tokens),
        ("GET", "/models", ends.models),
        ("GET", "/models/{name:path}", ends.model),
    ]
    routes = [
        Route(prefix + path, handler, methods=[method])
        for prefix in ("/v1", "")
        for method, path, handler in of_dialects
    ]
    for path, handler in (
        ("/", Page().show),
        ("/health", ends.health),
        ("/ready", ends.ready),
        ("/metrics", ends.metrics),
    ):
        routes.append(Route(path, handler))
    return guarded(routes, options.access, desk.metrics, options.bounds)
