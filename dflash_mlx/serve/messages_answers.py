"""The dialect of Anthropic's messages: what is answered, whole and as a stream."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from .answering import Answering, End
from .errors import Refusal
from .openai_forms import drafting, new_id
from .parts import Part, Reasoning, Text
from .sse import Frames, frame
from .tools import Call

PING: Final = frame({"type": "ping"}, "ping")
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def whole(answering: Answering) -> dict[str, Any]:
    """The answer at once. Raises `Refusal`."""
    blocks: list[dict[str, Any]] = []
    end: End | None = None
    async for step in answering.steps():
        for part in step.parts:
            _add(blocks, part)
        end = step.end or end
    assert end is not None  # or `steps` had raised
    return {
        **_head(answering),
        "content": blocks,
        **_stop(end),
        "usage": _usage(answering, end),
        "x_dflash": drafting([end]),
    }


def _add(blocks: list[dict[str, Any]], part: Part) -> None:
    if isinstance(part, Call):
        blocks.append(_block(part) | {"input": from_json(part.arguments)})
        return
    key = "text" if isinstance(part, Text) else "thinking"
    if not blocks or blocks[-1]["type"] != key:
        blocks.append(_block(part))
    blocks[-1][key] += part.text


def _block(part: Part) -> dict[str, Any]:
    """A block before anything is in it."""
    if isinstance(part, Text):
        return {"type": "text", "text": "", "citations": None}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    # Clients may know calls by these first letters.
    return {
        "type": "tool_use",
        "id": part.id.replace("call_", "toolu_"),
        "name": part.name,
        "input": {},
    }


async def stream(answering: Answering, request_id: str) -> Frames:
    """The answer as frames, those of a round in one piece; an error is the last of them."""
    usage = {"input_tokens": answering.prompt_tokens, "output_tokens": 0}
    message = {
        **_head(answering),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield _event("message_start", message=message) + PING
    blocks, open_ = -1, ""
    try:
        async for step in answering.steps():
            frames = []
            for part in step.parts:
                block = _block(part)
                kind = block["type"]
                if kind != open_ or isinstance(part, Call):
                    if open_:
                        frames.append(_event("content_block_stop", index=blocks))
                    blocks, open_ = blocks + 1, kind
                    frames.append(_event("content_block_start", index=blocks, content_block=block))
                frames.append(_event("content_block_delta", index=blocks, delta=_delta(part)))
            if step.end is not None:
                if open_:
                    frames.append(_event("content_block_stop", index=blocks))
                told, drafted = _usage(answering, step.end), drafting([step.end])
                stop = _stop(step.end)
                frames.append(_event("message_delta", delta=stop, usage=told, x_dflash=drafted))
                frames.append(_event("message_stop"))
            if frames:
                yield b"".join(frames)
    except Refusal as refusal:
        yield frame(refusal.anthropic(request_id), "error")


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments}


def _event(kind: str, **content: Any) -> bytes:
    return frame({"type": kind, **content}, kind)


def _head(answering: Answering) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": answering.ask.model,
    }


def _stop(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None else _REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _usage(answering: Answering, end: End) -> dict[str, Any]:
    cached = end.stats.reused_tokens
    return {
        "input_tokens": answering.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": end.stats.output_tokens,
    }
