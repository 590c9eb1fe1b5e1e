"""OpenAI's chat completions, completions and responses over a fake engine."""

import json

import pytest
from dialects import CHAT, COMPLETIONS, HI, RESPONSES, ask, user
from serving import FakeEngine, client, frames, make_target, post
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import DFlashError, NotEnoughMemoryError, PromptError, SettingsError
from dflash_mlx.events import Event, Stats
from dflash_mlx.serve.auth import Auth
from dflash_mlx.serve.http_errors import RequestError
from dflash_mlx.serve.logprobs import token_bytes
from dflash_mlx.serve.response_store import ResponseStore


def accumulated(chunks):
    """The text of each answer of a stream, and why they ended."""
    texts = {}
    reasons = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            reasons.add(choice["finish_reason"])
    return texts, reasons


@pytest.mark.parametrize("usage", [False, True])
def test_the_usage_of_several_answers(target, usage):
    """If the client wants it, a last chunk without choices has it, and none of the others."""
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": usage}}
    with client(FakeEngine(target, cached=3)) as server:
        whole = server.post(CHAT, json=ask(CHAT, n=3)).json()
        chunks = frames(server.post(CHAT, json=ask(CHAT, **options)).text)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["Hello world"] * 3
    assert accumulated(chunks) == (dict.fromkeys(range(3), "Hello world"), {None, "stop"})
    with_choices = chunks
    if usage:
        *with_choices, last = chunks
        assert not last["choices"] and last["usage"] == whole["usage"]
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in with_choices)
    tokens = whole["usage"]["completion_tokens"]
    details = whole["usage"]["completion_tokens_details"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert tokens % 3 == 0 and tokens == drafted
    assert whole["usage"]["total_tokens"] == tokens + whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DFlashError("The engine has stopped."), "The engine has stopped."),
        (RuntimeError("boom"), "The answer could not be finished (RuntimeError: boom)."),
    ],
)
def test_an_engine_error_is_answered_counted_and_logged(target, error, message, caplog):
    with client(FakeEngine(target, ["Hello"], error=error)) as server:
        answer = server.post(CHAT, json=ask(CHAT))
        last = frames(server.post(CHAT, json=ask(CHAT, stream=True)).text)[-1]
        metrics = server.get("/metrics").text
    assert answer.status_code == 500 and answer.json() == last
    assert last["error"]["message"] == message
    assert "dflash_open_answers 0.0" in metrics and "dflash_request_failure_total 2.0" in metrics
    # Both are logged: the status of the stream was 200 already. Only an unexpected error has a
    # traceback.
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == 2 and all(message in record.getMessage() for record in logged)
    has_traceback = isinstance(error, RuntimeError)
    assert all(bool(record.exc_info) is has_traceback for record in logged)


@pytest.mark.parametrize(
    ("error", "status"),
    [(SettingsError, 400), (PromptError, 400), (NotEnoughMemoryError, 400), (KeyError, 500)],
)
def test_a_request_that_the_engine_refuses_frees_its_slots(engine, monkeypatch, error, status):
    """The engine accepts the first of two answers, and refuses the second."""
    submit = engine.submit

    def refuse_second(prompt, **settings):
        if engine.submitted:
            raise error("No.")
        return submit(prompt, **settings)

    monkeypatch.setattr(engine, "submit", refuse_second)
    with client(engine, capacity=2) as server:
        answer = server.post(CHAT, json=ask(CHAT, n=2))
        metrics = server.get("/metrics").text
    assert answer.status_code == status and engine.jobs[0].cancelled
    assert "dflash_open_answers 0.0" in metrics
    if status == 400:
        assert answer.json()["error"]["message"] == "No."
        assert "dflash_request_failure_total 0.0" in metrics


def test_more_answers_than_the_capacity_are_refused(engine):
    three = ask(COMPLETIONS, prompt=["One", "Two", "Three"])
    with client(engine, capacity=2) as server:
        for path, body in ((CHAT, ask(CHAT, n=3)), (COMPLETIONS, three)):
            refused = server.post(path, json=body)
            assert refused.status_code == 400 and "not 3" in refused.json()["error"]["message"]
        for _ in range(2):  # the slots are free again
            assert server.post(CHAT, json=ask(CHAT, n=2)).status_code == 200


def test_log_probabilities_have_the_spaces_of_sentencepiece():
    pieces = ["Hello", "\u2581world", "\u2581", "\ufffd", "<0xE2>"]
    vocabulary = BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(vocabulary)
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    spelled = [token_bytes(fast, token) for token in range(len(pieces))]
    assert spelled == [b"Hello", b" world", b" ", "\ufffd".encode(), b"\xe2"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("One two", ["One two"]),
        (["One", "Two"], ["One", "Two"]),
        ([65, 66, 67], [[65, 66, 67]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_every_kind_of_prompt_is_completed(engine, prompt, prompts):
    body = ask(COMPLETIONS, prompt=prompt, n=2)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with client(engine) as server:
        answer = server.post(COMPLETIONS, json=body).json()
        chunks = frames(server.post(COMPLETIONS, json=body | more).text)
    encode = engine.target.tokenizer.encode
    ids = [item if isinstance(item, list) else encode(item) for item in prompts]
    submitted = [prompt for prompt, _ in engine.submitted]
    two_answers_each = [item for item in ids for _ in range(2)]
    assert submitted == two_answers_each * 2, "whole and streamed"
    texts = dict.fromkeys(range(2 * len(ids)), "Hello world")
    assert {choice["index"]: choice["text"] for choice in answer["choices"]} == texts
    assert accumulated(chunks) == (texts, {None, "stop"})
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_one_refused_prompt_cancels_the_others(engine):
    with client(engine) as server:
        answer = server.post(COMPLETIONS, json=ask(COMPLETIONS, prompt=["One", ""]))
        metrics = server.get("/metrics").text
    assert answer.status_code == 400 and engine.jobs[0].cancelled
    assert "dflash_open_answers 0.0" in metrics


def test_a_completion_is_not_split_into_thought_and_text():
    steps = ["<think>", "Hm</think>", "So."]
    with client(FakeEngine(make_target(thinking=""), steps)) as server:
        answer = server.post(COMPLETIONS, json=ask(COMPLETIONS)).json()
        chunks = frames(server.post(COMPLETIONS, json=ask(COMPLETIONS, stream=True)).text)
    assert answer["choices"][0]["text"] == "".join(steps)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == steps


def tool(name, **more):
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **more}


@pytest.fixture(scope="module")
def thinking():
    return make_target("json_tools", thinking="<think>\n")


def streamed_response(engine, *items, **more):
    """The last event's response of a stream, and all events.

    The stream must have the same items as the response to the same request without a stream.
    """
    body = ask(RESPONSES, *items, **more)
    whole = post(engine, RESPONSES, body).json()
    events = frames(post(engine, RESPONSES, body | {"stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == [item["type"] for item in whole["output"]]
    return last, events


def test_a_response_has_reasoning_text_and_calls(thinking):
    """One call is of a tool in a namespace, the other of an unknown tool."""
    said = ["Hm", ".\n</think>", "\n\nYes", ".<tool_call>\n", '{"name": "sp__f", "arguments"']
    said += [': {"a": 1}}\n</tool_call><tool_call>{"name": "other", "arguments": {}}</tool_call>']
    engine = FakeEngine(thinking, said, cached=4)
    space = {"type": "namespace", "name": "sp", "tools": [tool("f")]}
    answer, _ = streamed_response(engine, tools=[space, {"type": "web_search"}, tool("g")])
    thought, text, call, other = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert text["content"][0]["text"] == "Yes."
    assert (call["namespace"], call["name"], call["arguments"]) == ("sp", "f", '{"a": 1}')
    assert (other["type"], other["name"], other["arguments"]) == ("function_call", "other", "{}")
    assert answer["status"] == "completed" and "web_search" not in engine.prompt()
    tokens = thinking.tokenizer.encode("Hm.\n</think>", add_special_tokens=False)
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len(tokens)


@pytest.mark.parametrize("stop", [None, ["Y"], ["es."]])
def test_reasoning_tokens_are_those_that_the_model_wrote(thinking, stop):
    """The model writes each letter as a token, where the tokenizer would write whole words."""
    engine = FakeEngine(thinking)
    thought = "Two and two."
    texts = [*thought, "</think>", "\n", *"Yes."]
    tokens = [thinking.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(ids) == 1 for ids in tokens)
    stats = Stats()
    last = len(texts) - 1

    def events(_):
        for number, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
            stats.count_step(1, 0, 1)
            yield Event(
                text,
                tokens=ids,
                accepted=0,
                drafted=1,
                finish_reason="stop" if number == last else None,
                stats=stats,
            )

    engine._events = events
    usage = post(engine, CHAT, ask(CHAT, stop=stop)).json()["usage"]
    assert usage["completion_tokens"] == len(texts)
    # The end marker of the thought counts as well.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought) + 1


PATCH = '*** Begin Patch\n+\t<b>&</b> "x"\n*** End Patch\n'


def test_a_custom_tool_is_called_with_text(thinking):
    """Codex's apply_patch: the model reads a function with one argument."""
    call = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
    engine = FakeEngine(thinking, ["</think><tool_call>\n", call, "\n</tool_call>"])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: hunk+"}
    custom = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    answer, events = streamed_response(engine, tools=[custom])
    assert all(words in engine.prompt() for words in ("apply_patch", "Edits.", "start: hunk+"))
    [item] = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    kind = "response.custom_tool_call_input"
    assert [event["delta"] for event in events if event["type"] == f"{kind}.delta"] == [PATCH]
    assert [event["input"] for event in events if event["type"] == f"{kind}.done"] == [PATCH]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    streamed_response(engine, *HI, item, result)
    assert "Done!" in engine.prompt() and json.dumps(PATCH)[1:-1] in engine.prompt()


def test_a_response_is_continued_by_its_id(thinking):
    engine = FakeEngine(thinking, ["Hm</think>First."])
    with client(engine) as server:

        def create(path, *items, **more):
            return server.post(f"{RESPONSES}{path}", json=ask(RESPONSES, *items, **more))

        first = create("", instructions="Be brief.").json()
        stream = create("", user("More"), previous_response_id=first["id"], stream=True)
        prompt = engine.prompt()
        last = frames(stream.text)[-1]["response"]
        assert last["previous_response_id"] == first["id"] and last["store"]
        assert prompt.index("user\nHi") < prompt.index("First.") < prompt.index("user\nMore")
        assert "Be brief." not in prompt  # instructions are of one response
        assert server.get(f"{RESPONSES}/{first['id']}").json() == first
        question = user("So?")
        last_id = last["id"]
        told = create("/input_tokens", question, previous_response_id=last_id).json()
        read = create("", question, previous_response_id=last_id).json()["usage"]["input_tokens"]
        assert told == {"object": "response.input_tokens", "input_tokens": read}
        assert engine.prompt().count("First.") == 2
        # An item by its id, as the AI SDK sends it.
        for kind in ({"type": "item_reference"}, {}):
            create("", kind | {"id": last["output"][1]["id"]}, user("So?"))
            assert engine.prompt().count("First.") == 1 and "More" not in engine.prompt()
        assert server.delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
        assert server.get(f"{RESPONSES}/{first['id']}").status_code == 404
        again = create("", question, previous_response_id=last_id)
        assert again.status_code == 200, "the last response is still stored"


def test_a_response_that_is_not_stored_or_another_users_is_not_found(engine):
    mine = {"Authorization": "Bearer a"}
    theirs = {"Authorization": "Bearer b"}
    with client(engine, auth=Auth(keys=frozenset("ab"))) as server:

        def create(headers, **more):
            return server.post(RESPONSES, json=ask(RESPONSES, **more), headers=headers)

        stored = create(mine).json()["id"]
        not_stored = create(mine, store=False).json()["id"]
        for id, user, status in (
            (stored, mine, 200),
            (stored, theirs, 400),
            (not_stored, mine, 400),
        ):
            again = create(user, previous_response_id=id)
            assert again.status_code == status, again.text
        assert again.json()["error"]["code"] == "previous_response_not_found"


def test_the_least_recently_used_response_is_dropped():
    store = ResponseStore(1400)  # bytes, enough for two of these responses

    def add(name):
        output = [{"type": "message", "id": f"{name} 1", "content": "y" * 200}]
        store.add("", [], {"id": name, "output": output})

    add("a")
    add("b")
    store.get("", "a")
    add("c")
    assert store.get("", "a") and store.get("", "c")
    with pytest.raises(RequestError):
        store.get("", "b")
