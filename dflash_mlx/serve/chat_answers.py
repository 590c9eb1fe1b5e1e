"""The dialect of OpenAI's chat completions: what is answered, whole and as a stream."""

from __future__ import annotations

import time
from typing import Any

from .answering import Answering, End, Step
from .errors import Refusal
from .logprobs import TokenLogprob
from .openai_forms import drafting, logprob, new_id, of_round, usage
from .parts import Reasoning, Text
from .sse import Chunks, Frames, frame
from .tools import Call

DONE = b"data: [DONE]\n\n"


class _Choice:
    """One answer, as it grows."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[Call] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.end: End | None = None

    def add(self, step: Step) -> None:
        """A step of this answer."""
        for part in step.parts:
            if isinstance(part, Text):
                self.text += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            else:
                self.calls.append(part)
        if step.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *step.logprobs]
        self.end = step.end or self.end

    def form(self, index: int) -> dict[str, Any]:
        """As a choice of the answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if not self.calls:
            message["content"] = self.text
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(one) for one in self.calls]
        return {
            "index": index,
            "message": message | {"refusal": None},
            "logprobs": _logprobs(self.logprobs),
            "finish_reason": self.end.reason if self.end else None,
        }


async def whole(answering: Answering) -> dict[str, Any]:
    """The answer at once. Raises `Refusal`."""
    choices = [_Choice() for _ in range(answering.ask.n)]
    async for step in answering.steps():
        choices[step.choice].add(step)
    ends = [one.end for one in choices if one.end is not None]
    return {
        **_head(answering, "chat.completion"),
        "choices": [one.form(index) for index, one in enumerate(choices)],
        "usage": usage(answering.prompt_tokens, ends),
        "x_dflash": drafting(ends),
    }


async def stream(answering: Answering, include_usage: bool) -> Frames:
    """The answer as frames, those of a round in one piece; an error is the last of them."""
    head = _head(answering, "chat.completion.chunk")
    chunks = Chunks(head | {"usage": None} if include_usage else head)

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra = {"x_dflash": more.pop("x_dflash")} if "x_dflash" in more else {}
        return chunks.frame({"choices": [choice | more]} | extra)

    ends: list[End] = []
    calls = [0] * answering.ask.n
    yield b"".join(
        chunk(index, {"role": "assistant", "content": ""}) for index in range(answering.ask.n)
    )
    try:
        async for step in answering.steps():
            frames = []
            deltas = _deltas(step, calls)
            if deltas or step.logprobs:
                delta, *rest = deltas or [{}]
                shown = _logprobs(step.logprobs)
                frames.append(chunk(step.choice, delta, logprobs=shown, x_dflash=of_round(step)))
                frames += [chunk(step.choice, delta) for delta in rest]
            if step.end is not None:
                ends.append(step.end)
                frames.append(chunk(step.choice, {}, finish_reason=step.end.reason))
            if frames:
                yield b"".join(frames)
    except Refusal as refusal:
        yield frame(refusal.openai())
        return
    if include_usage:
        told = usage(answering.prompt_tokens, ends)
        yield frame(head | {"choices": [], "usage": told, "x_dflash": drafting(ends)}) + DONE
    else:
        yield DONE


def _deltas(step: Step, calls: list[int]) -> list[dict[str, Any]]:
    """What a step adds; `calls` counts those of each answer."""
    deltas: list[dict[str, Any]] = []
    for part in step.parts:
        if isinstance(part, Text):
            deltas.append({"content": part.text})
        elif isinstance(part, Reasoning):
            deltas.append({"reasoning_content": part.text, "reasoning": part.text})
        else:
            index = calls[step.choice]
            calls[step.choice] += 1
            deltas.append({"tool_calls": [{"index": index, **_call(part)}]})
    return deltas


def _head(answering: Answering, kind: str) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl-"),
        "object": kind,
        "created": int(time.time()),
        "model": answering.ask.model,
    }


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(told: list[TokenLogprob] | None) -> dict[str, Any] | None:
    return None if told is None else {"content": [logprob(one) for one in told], "refusal": None}
