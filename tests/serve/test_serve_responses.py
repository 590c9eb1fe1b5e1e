"""OpenAI's responses over a fake engine."""

import json

import pytest
from dialects import RESPONSES, ask
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, client, frames, make_target

from dflash_mlx.serve.auth import Auth
from dflash_mlx.serve.errors import RequestError
from dflash_mlx.serve.response_store import ResponseStore

PATH = RESPONSES


def tool(name, **more):
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **more}


@pytest.fixture(scope="module")
def target():
    return make_target(json_tools, thinking="<think>\n")


def streamed(server, body):
    events = frames(server.post(PATH, json=body | {"stream": True}).text)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return events


def test_reasoning_text_and_calls(target):
    said = ["Hm", ".\n</think>", "\n\nYes", ".<tool_call>\n", '{"name": "sp__f", "arguments"']
    engine = FakeEngine(target, [*said, ': {"a": 1}}\n</tool_call>'], cached=4)
    space = {"type": "namespace", "name": "sp", "tools": [tool("f")]}
    body = ask(PATH, tools=[space, {"type": "web_search"}, tool("g")])
    with client(engine) as server:
        answer = server.post(PATH, json=body).json()
        events = streamed(server, body)
    thought, text, call = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert text["content"][0]["text"] == "Yes."
    assert (call["namespace"], call["name"], call["arguments"]) == ("sp", "f", '{"a": 1}')
    assert answer["status"] == "completed" and "web_search" not in engine.prompt()
    assert events[-1]["type"] == "response.completed"
    details = answer["usage"]["output_tokens_details"]
    reasoning = target.tokenizer.encode("Hm.", add_special_tokens=False)
    assert details["reasoning_tokens"] == len(reasoning)


def test_a_tool_that_was_not_offered_is_handed_on(target):
    engine = FakeEngine(target, ['<tool_call>{"name": "other", "arguments": {"q": 1}}</tool_call>'])
    body = ask(PATH, tools=[tool("f")])
    with client(engine) as server:
        (call,) = server.post(PATH, json=body).json()["output"]
        events = streamed(server, body)
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "other", '{"q": 1}')
    assert events[-1]["type"] == "response.completed"


PATCH = '*** Begin Patch\n+\t<b>&</b> "x"\n*** End Patch\n'


def test_a_custom_tool_is_called_with_text(target):
    """Codex's apply_patch: the model reads a function with one argument."""
    call = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
    engine = FakeEngine(target, ["</think><tool_call>\n", call, "\n</tool_call>"])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: hunk+"}
    custom = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    with client(engine) as server:
        events = streamed(server, ask(PATH, tools=[custom]))
        [item] = events[-1]["response"]["output"]
        prompt = engine.prompt()
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
        server.post(PATH, json=ask(PATH, input=[{"role": "user", "content": "Hi"}, item, result]))
    assert "apply_patch" in prompt and "Edits." in prompt and "start: hunk+" in prompt
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    kind = "response.custom_tool_call_input"
    assert [one["delta"] for one in events if one["type"] == f"{kind}.delta"] == [PATCH]
    assert [one["input"] for one in events if one["type"] == f"{kind}.done"] == [PATCH]
    after = engine.prompt()
    assert "Done!" in after and json.dumps(PATCH)[1:-1] in after


def test_a_response_is_continued_by_its_id(target):
    engine = FakeEngine(target, ["Hm</think>First."])
    with client(engine) as server:
        first = server.post(PATH, json=ask(PATH, instructions="Be brief.")).json()
        second = streamed(server, ask(PATH, input="More", previous_response_id=first["id"]))[-1]
        prompt, last = engine.prompt(), second["response"]
        assert last["previous_response_id"] == first["id"] and last["store"]
        assert prompt.index("user\nHi") < prompt.index("First.") < prompt.index("user\nMore")
        assert "Be brief." not in prompt  # instructions are of one response
        assert server.get(f"{PATH}/{first['id']}").json() == first
        asked = ask(PATH, input="So?", previous_response_id=last["id"])
        told = server.post(f"{PATH}/input_tokens", json=asked).json()
        assert told["object"] == "response.input_tokens"
        assert told["input_tokens"] == server.post(PATH, json=asked).json()["usage"]["input_tokens"]
        assert engine.prompt().count("First.") == 2
        # An item by its id, as the AI SDK sends it.
        for kind in ({"type": "item_reference"}, {}):
            item = kind | {"id": last["output"][1]["id"]}
            server.post(PATH, json=ask(PATH, input=[item, {"role": "user", "content": "So?"}]))
            assert engine.prompt().count("First.") == 1 and "More" not in engine.prompt()
        assert server.delete(f"{PATH}/{first['id']}").json()["deleted"]
        assert server.get(f"{PATH}/{first['id']}").status_code == 404
        assert server.post(PATH, json=asked).status_code == 200  # of the last one


def test_a_response_that_is_not_stored_or_another_users_is_not_found(target):
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
    with client(FakeEngine(target), auth=Auth(keys=frozenset("ab"))) as server:
        kept, left = (
            server.post(PATH, json=ask(PATH, store=store), headers=mine).json()["id"]
            for store in (None, False)
        )
        for id, user, status in ((kept, mine, 200), (kept, theirs, 400), (left, mine, 400)):
            again = server.post(PATH, json=ask(PATH, previous_response_id=id), headers=user)
            assert again.status_code == status, again.text
        assert again.json()["error"]["code"] == "previous_response_not_found"


def test_the_least_recently_used_response_is_dropped():
    def add(name):
        output = [{"type": "message", "id": f"{name} 1", "content": "y" * 200}]
        store.add("", [], {"id": name, "output": output})

    store = ResponseStore(1400)
    add("a"), add("b")
    store.get("", "a")
    add("c")
    assert store.get("", "a") and store.get("", "c")
    with pytest.raises(RequestError):
        store.get("", "b")
