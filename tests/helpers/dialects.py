"""Clients of the four APIs: each has a conversation, and reads complete or streamed answers."""

import json
from typing import Any, NamedTuple

from serving import frames, post

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path"],
}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
OLLAMA = "/api/chat"
GENERATE = "/api/generate"
HI = [{"role": "user", "content": "Hi"}]


def user(content: Any, **more: Any) -> dict[str, Any]:
    """A message of a user."""
    return {"role": "user", "content": content, **more}


def ask(path: str, *items: Any, **more: Any) -> dict[str, Any]:
    """A request body for the API at a path, with the given messages or items, or with "Hi"."""
    name = {COMPLETIONS: "prompt", GENERATE: "prompt", RESPONSES: "input"}.get(path, "messages")
    prompt: Any = list(items)
    if not items:
        prompt = HI if name == "messages" else "Hi"
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    return {"model": "m", name: prompt, **limit, **more}


def post_ok(engine: Any, path: str, fields: dict[str, Any], **defaults: Any) -> Any:
    """Post a request with these fields, check that it is answered, and return the response.

    The server's default settings are `defaults`.
    """
    answer = post(engine, path, ask(path) | fields, defaults=defaults)
    assert answer.status_code == 200, answer.text
    return answer


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of a model's streamed message."""
    message: dict[str, Any] = {"role": "assistant"}
    for part in parts:
        for key, value in part.items():
            if key != "role":
                message[key] = message[key] + value if key in message else value
    return message


class ClientAnswer(NamedTuple):
    """An answer of any API.

    calls: (id, name, arguments in JSON) of each tool call.
    tokens: the numbers of prompt, cached and output tokens.
    """

    thought: str | None
    text: str
    calls: list[tuple[str, str, str]]
    reason: str
    tokens: tuple[int, int | None, int]


class Chat:
    """OpenAI's chat completions."""

    path = CHAT

    def __init__(self, *questions: str) -> None:
        self.items: list[Any] = [user(question) for question in questions]

    def body(self, **more: Any) -> dict[str, Any]:
        """A request of this conversation, with a tool."""
        tool = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
        return {"model": "m", "messages": self.items, "tools": [tool], **more}

    def ask(self, server: Any, streamed: bool = False, **more: Any) -> ClientAnswer:
        """Request an answer, and add it to the conversation."""
        if streamed and self.path == CHAT:
            more["stream_options"] = {"include_usage": True}
        answer = server.post(self.path, json=self.body(stream=streamed, **more))
        assert answer.status_code == 200, answer.text
        return self.read(self.streamed(answer.text) if streamed else answer.json())

    def streamed(self, text: str) -> Any:
        """The complete answer of a stream."""
        *chunks, last = frames(text)
        assert all(chunk["usage"] is None for chunk in chunks)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        message = joined({"content": ""}, *(choice["delta"] for choice in choices))
        return last | {"choices": [choices[-1] | {"message": message}]}

    def read(self, got: Any) -> ClientAnswer:
        """Add an answer to the conversation, and return it in the common form."""
        [choice] = got["choices"]
        message = choice["message"]
        usage = got["usage"]
        self.items.append(message)
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        assert message.get("reasoning") == message.get("reasoning_content")
        return ClientAnswer(
            message.get("reasoning_content"),
            text=message["content"] or "",
            calls=[(id, call["name"], call["arguments"]) for id, call in calls],
            reason=choice["finish_reason"],
            tokens=(*tokens, usage["completion_tokens"]),
        )

    def result(self, id: str, text: str, failed: bool) -> None:
        """Add the result of a tool call to the conversation."""
        self.items.append({"role": "tool", "tool_call_id": id, "content": text})


class Messages(Chat):
    """Anthropic's messages."""

    path = MESSAGES

    def body(self, **more: Any) -> dict[str, Any]:
        tools = [{"name": "write", "input_schema": SCHEMA}]
        return {"messages": self.items, "tools": tools, "max_tokens": 99, **more}

    def streamed(self, text: str) -> Any:
        message: dict[str, Any] = {}
        for event in frames(text):
            if event["type"] == "message_start":
                message = event["message"]
                start = message["usage"]
            elif event["type"] == "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            elif event["type"] == "content_block_delta":
                block = message["content"][event["index"]]
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    block[block["type"]] += delta[block["type"]]
            elif event["type"] == "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
        for key in ("input_tokens", "cache_read_input_tokens"):  # clients add them up
            assert start[key] == message["usage"][key]
        assert event["type"] == "message_stop"
        return message

    def read(self, got: Any) -> ClientAnswer:
        blocks = got["content"]
        usage = got["usage"]
        self.items.append({"role": "assistant", "content": blocks})
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        cached = usage["cache_read_input_tokens"]
        return ClientAnswer(
            "".join(thoughts) or None,
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            calls=[(call["id"], call["name"], json.dumps(call["input"])) for call in calls],
            reason=got["stop_reason"],
            tokens=(usage["input_tokens"] + cached, cached, usage["output_tokens"]),
        )

    def result(self, id: str, text: str, failed: bool) -> None:
        block = {"type": "tool_result", "tool_use_id": id, "content": text, "is_error": failed}
        if self.items[-1]["role"] == "assistant":
            self.items.append({"role": "user", "content": []})
        self.items[-1]["content"].append(block)


class Responses(Chat):
    """OpenAI's responses."""

    path = RESPONSES

    def body(self, **more: Any) -> dict[str, Any]:
        tool = {"type": "function", "name": "write", "parameters": SCHEMA}
        return {"input": self.items, "tools": [tool], **more}

    def streamed(self, text: str) -> Any:
        events = frames(text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == last["output"] and events[-1]["type"] == f"response.{last['status']}"
        deltas = [
            event["delta"] for event in events if event["type"] == "response.output_text.delta"
        ]
        texts = [item["content"][0]["text"] for item in done if item["type"] == "message"]
        assert "".join(deltas) == "".join(texts)
        return last

    def read(self, got: Any) -> ClientAnswer:
        output = got["output"]
        usage = got["usage"]
        self.items += output
        thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
        calls = [item for item in output if item["type"] == "function_call"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return ClientAnswer(
            "".join(thoughts) or None,
            text="".join(
                item["content"][0]["text"] for item in output if item["type"] == "message"
            ),
            calls=[(call["call_id"], call["name"], call["arguments"]) for call in calls],
            reason=got["status"],
            tokens=(usage["input_tokens"], cached, usage["output_tokens"]),
        )

    def result(self, id: str, text: str, failed: bool) -> None:
        self.items.append({"type": "function_call_output", "call_id": id, "output": text})


class Ollama(Chat):
    """Ollama's chat."""

    path = OLLAMA

    def streamed(self, text: str) -> Any:
        *pieces, last = map(json.loads, text.splitlines())
        assert not any(piece["done"] for piece in pieces)
        return last | {"message": joined(*(piece["message"] for piece in pieces))}

    def read(self, got: Any) -> ClientAnswer:
        message = got["message"]
        self.items.append(message)
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        assert got["done"] and got["total_duration"] > got["load_duration"] > 0
        return ClientAnswer(
            message.get("thinking"),
            text=message["content"],
            calls=[(id, call["name"], json.dumps(call["arguments"])) for id, call in calls],
            reason=got["done_reason"],
            tokens=(got["prompt_eval_count"], None, got["eval_count"]),
        )


APIS = (Chat, Messages, Responses, Ollama)
