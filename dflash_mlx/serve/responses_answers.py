"""The dialect of OpenAI's responses: what is answered, whole and as a stream.

Both are made by the same hand: the events of a stream add up to the object at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .answering import Answering, End, Step
from .errors import Refusal
from .openai_forms import drafting, logprob, new_id
from .parts import Part, Text
from .responses import ResponsesBody
from .sse import Frames, frame
from .tools import Call

Events = Iterator[dict[str, Any]]


class Answers:
    """One response, as it grows.

    Args:
        body: what was asked.
        answering: the answer.
    """

    def __init__(self, body: ResponsesBody, answering: Answering) -> None:
        self._body, self._answering = body, answering
        self._id, self._created = new_id("resp_"), int(time.time())
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item may grow
        self._logprobs: list[dict[str, Any]] = []
        self._end: End | None = None
        self._names = {tool.name: (space, name) for space, name, tool in body.functions()}

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises `Refusal`."""
        async for step in self._answering.steps():
            for _ in self._take(step):
                pass
        return self._response()

    async def stream(self) -> Frames:
        """The answer as frames, those of a round in one piece; an error is the last of them."""
        number = 0

        def numbered(event: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return frame({**event, "sequence_number": number - 1}, event["type"])

        for kind in ("response.created", "response.in_progress"):
            yield numbered({"type": kind, "response": self._response()})
        try:
            async for step in self._answering.steps():
                if frames := b"".join(map(numbered, self._take(step))):
                    yield frames
        except Refusal as refusal:
            failed = self._response() | {"status": "failed"}
            code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
            failed["error"] = {"code": code, "message": str(refusal)}
            yield numbered({"type": "response.failed", "response": failed})
            return
        response = self._response()
        yield numbered({"type": f"response.{response['status']}", "response": response})

    def _take(self, step: Step) -> Events:
        for part in step.parts:
            told = [] if step.logprobs is None else [logprob(one) for one in step.logprobs]
            yield from self._add(part, told if part is step.parts[0] else [])
        if not step.parts and step.logprobs:
            self._logprobs += [logprob(one) for one in step.logprobs]
        if step.end is not None:
            self._end = step.end
            yield from self._close()

    def _add(self, part: Part, told: list[dict[str, Any]]) -> Events:
        if isinstance(part, Call):
            yield from self._call(part)
            return
        kind = "message" if isinstance(part, Text) else "reasoning"
        if not self._open or self._output[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        item = self._output[-1]
        (content,) = item["content"]
        content["text"] += part.text
        event = {**self._place(), "content_index": 0, "delta": part.text}
        if kind == "message":
            told, self._logprobs = self._logprobs + told, []
            if self._body.tells_logprobs:
                content["logprobs"] += told
            yield {"type": "response.output_text.delta", **event, "logprobs": told}
        else:
            self._logprobs += told
            yield {"type": "response.reasoning_text.delta", **event}

    def _begin(self, kind: str) -> Events:
        """An item of text, with nothing in it."""
        self._open = True
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            content: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            content["logprobs"] = []
            item |= {"id": new_id("msg_"), "role": "assistant"}
        else:
            content = {"type": "reasoning_text", "text": ""}
            item |= {"id": new_id("rs_"), "summary": []}
        self._output.append(item | {"content": [content]})
        empty = item | {"content": []}
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._output) - 1,
            "item": empty,
        }
        event = {**self._place(), "content_index": 0, "part": dict(content)}
        yield {"type": "response.content_part.added", **event}

    def _close(self) -> Events:
        """The last item is whole."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        cut = self._end is not None and self._end.reason == "length"
        item["status"] = "incomplete" if cut else "completed"
        (content,) = item["content"]
        event = {**self._place(), "content_index": 0}
        if item["type"] == "message":
            done = {"text": content["text"], "logprobs": content["logprobs"]}
            yield {"type": "response.output_text.done", **event, **done}
        else:
            yield {"type": "response.reasoning_text.done", **event, "text": content["text"]}
        yield {"type": "response.content_part.done", **event, "part": dict(content)}
        yield self._done()

    def _call(self, call: Call) -> Events:
        yield from self._close()
        space, name = self._names[call.name]
        item: dict[str, Any] = {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": call.id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        if space is not None:
            item["namespace"] = space
        self._output.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._output) - 1,
            "item": dict(item),
        }
        place = self._place()
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **place, "delta": call.arguments}
        yield {"type": f"{kind}.done", **place, "arguments": call.arguments, "name": name}
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._done()

    def _done(self) -> dict[str, Any]:
        place = len(self._output) - 1
        item = dict(self._output[-1])
        return {"type": "response.output_item.done", "output_index": place, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _response(self) -> dict[str, Any]:
        """The object, so far."""
        body, end = self._body, self._end
        status, incomplete, usage = "in_progress", None, None
        if end is not None:
            cut = end.reason == "length"
            status = "incomplete" if cut else "completed"
            incomplete = {"reason": "max_output_tokens"} if cut else None
            usage = _usage(self._answering.prompt_tokens, end)
        asked = body.model_dump(by_alias=True, include={"text", "tools", "reasoning"})
        choice = body.tool_choice
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": asked["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (asked["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
        }
        if not isinstance(choice, str | None):
            response["tool_choice"] = choice.model_dump()
        if end is not None:
            response["x_dflash"] = drafting([end])
        return response


def _usage(prompt_tokens: int, end: End) -> dict[str, Any]:
    stats = end.stats
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": end.reasoning_tokens,
            "accepted_prediction_tokens": stats.accepted_tokens,
            "rejected_prediction_tokens": stats.drafted_tokens - stats.accepted_tokens,
        },
        "total_tokens": prompt_tokens + stats.output_tokens,
    }
