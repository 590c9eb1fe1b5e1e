"""What all APIs have in common: whole and streamed answers, tools, images, errors.

The templates in data/templates make the same demands as the published ones.
"""

import asyncio
import json
import re
from pathlib import Path

import pytest
from answers import KNOWN, WRITERS, written
from dialects import (
    APIS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    Chat,
    Messages,
    Ollama,
    Responses,
    ask,
    user,
)
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from serving import FakeEngine, FakeJob, client, frames, make_target, post, target_of

from dflash_mlx.serve import sse

DATA = Path(__file__).parents[1] / "data"
CALL = '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>'
STOPPED = {Chat: "tool_calls", Messages: "tool_use", Responses: "completed", Ollama: "stop"}
CUT = {Chat: "length", Messages: "max_tokens", Responses: "incomplete", Ollama: "length"}
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path[4:])


@pytest.fixture(scope="module")
def thinking():
    return make_target("json_tools", thinking="<think>\n")


@each_api
@pytest.mark.parametrize("truncated", [False, True])
def test_a_stream_adds_up_to_the_whole_answer(api, truncated, thinking):
    """The answer is a thought, a text and a call, or is truncated before the call."""
    steps = ["Hm", ".\n</think>", "\n\nYe", "s."]
    expected_calls = []
    if not truncated:
        steps.append(CALL)
        expected_calls = [("write", {"path": "a"})]
    engine = FakeEngine(thinking, steps, reason="length" if truncated else "stop", cached=3)
    with client(engine) as server:
        whole = api("Hi").ask(server, False)
        streamed = api("Hi").ask(server, True)
    for answer in (whole, streamed):
        calls = [(name, json.loads(arguments)) for _, name, arguments in answer.calls]
        assert calls == expected_calls
    # The calls were compared above, because their ids differ.
    assert whole._replace(calls=[]) == streamed._replace(calls=[])
    reason = CUT[api] if truncated else STOPPED[api]
    assert (whole.thought, whole.text, whole.reason) == ("Hm.", "Yes.", reason)
    prompt, cached, output = whole.tokens
    encode = thinking.tokenizer.encode
    tokens = sum(len(encode(step, add_special_tokens=False)) for step in steps)
    assert prompt == len(engine.submitted[0][0]) and output >= tokens
    assert cached == (None if api is Ollama else 3)


INSTRUCTIONS = {RESPONSES: {"instructions": "Be brief."}, MESSAGES: {"system": "Be brief."}}


@each_api
def test_all_turns_reach_a_template_without_tools(engine, api, thinking):
    """Tools, calls and results are written as text."""
    talk = api("Hi")
    more = INSTRUCTIONS.get(api.path, {})
    if not more:
        talk.items.insert(0, {"role": "developer", "content": "Be brief."})
    with client(FakeEngine(thinking, ["Hm</think>", CALL])) as server:
        [(id, _, _)] = talk.ask(server, **more).calls
    talk.result(id, "42", False)
    parts = [{"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]
    talk.items.append(user(parts if api is Chat else "Go on."))
    with client(engine) as server:
        talk.ask(server, **more)
    prompt = engine.prompt()
    call = '{"name": "write", "arguments": {"path": "a"}}'  # in words
    parts_in_order = ["<|im_start|>system\nYou can call", "Be brief.", "user\nHi", call]
    parts_in_order += ["<tool_response>", "42", "Go on."]
    places = [prompt.index(part) for part in parts_in_order]
    assert places == sorted(places)
    assert prompt.endswith("<|im_start|>assistant\n")


CODE = "\tif x < 1:\n    <a href='#'>\u00e9</a>\n</parameter> null  "
CALLS = [("write", {"path": "first.py", "text": CODE}), ("write", {"path": "second.py"})]
FINAL = {"harmony": "<|channel|>final<|message|>", "muse_spark": "to=user<|message|>"}


def thought_and_calls(family):
    """The text of an answer with a thought and two calls."""
    calls = [written(family, *call) for call in CALLS]
    inside = [WRITERS[family](*call) for call in CALLS]
    if family == "harmony":
        between = "<|start|>assistant"
        thought = f"<|channel|>analysis<|message|>Let me see.<|end|>{between}"
        return thought + between.join(inside).removesuffix("<|call|>")
    if family == "muse_spark":
        to = "<|eom|><|start|>assistant to=write<|message|>"
        return to.join(["to=self<|message|>Let me see.", *calls])
    joined = {
        "mistral": "".join(f"[TOOL_CALLS]{call}" for call in inside),
        "llama3": "; ".join(inside),
    }.get(family, "\n".join(calls))
    return f"<think>Let me see.</think>\n\n{joined}"


@each_api
@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_three_turns_of_every_family(family, api, streamed):
    """A thought with two calls, an answer to their results, and an answer to a further question."""
    talk = api("Write.")
    engine = FakeEngine(target_of(family))
    control_tokens = "|".join(map(re.escape, engine.target.tokenizer.get_added_vocab()))
    with client(engine) as server:

        def turn(text):
            """One turn, in which the model writes this text in steps of up to 7 characters."""
            engine.steps = re.findall(
                f"{control_tokens}|(?s:(?:(?!{control_tokens}).){{1,7}})", text
            )
            return talk.ask(server, streamed)[:3]

        thought, text, calls = turn(thought_and_calls(family))
        assert (thought, text) == ("Let me see.", "") and "path" in engine.prompt()
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLS
        first_id = calls[0][0]
        second_id = calls[1][0]
        talk.result(first_id, "All 17 lines.", False)
        talk.result(second_id, "No such folder.", True)
        final = FINAL.get(family, "")
        assert turn(final + "One failed.") == (None, "One failed.", [])
        talk.items.append(user("Go on."))
        assert turn(final + "Yes.")[1] == "Yes."
    prompt = engine.prompt()
    for said in ("first.py", "second.py", "17 lines.", "No such folder.", "One failed.", "Go on."):
        assert prompt.count(said) == 1, prompt
    assert prompt.index("first.py") < prompt.index("17 lines.") < prompt.index("No such folder.")


def test_the_template_of_deepseek_gets_arguments_as_text():
    """mlx-lm's template takes the arguments as text, where most take an object."""
    target = make_target(thinking="")
    tokenizer = target.tokenizer._tokenizer
    tokenizer.chat_template = None
    tokenizer.init_kwargs["chat_template_type"] = "deepseek_v32"
    apply = deepseek_v32.apply_chat_template
    target.tokenizer = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, [2], apply)
    engine = FakeEngine(target, [written("deepseek_v32", *CALLS[0])])
    talk = Chat("Write.")
    with client(engine) as server:
        ((id, _, arguments),) = talk.ask(server).calls
        assert json.loads(arguments) == CALLS[0][1]
        talk.result(id, "Done.", False)
        talk.ask(server)
    assert CODE in engine.prompt()


@pytest.mark.parametrize("family", ["mistral", "kimi_k2"])
def test_results_are_matched_to_their_calls_whatever_the_ids(family):
    """Ids may be another server's, used twice, or unknown."""
    function = {"name": "write", "arguments": '{"path": "x"}'}
    call = {"id": "call_0", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "one"}
    talk = Chat("Hi")
    engine = FakeEngine(target_of(family))
    for content, second, last in ((None, "b", "lost"), ("", "call_0", "call_0")):
        calls = [call, call | {"id": second}]
        talk.items.append({"role": "assistant", "content": content, "tool_calls": calls})
        talk.items += [result, result | {"tool_call_id": last, "content": "two"}]
    with client(engine) as server:
        talk.ask(server)
    ids = [KNOWN[family].call_ids.format(name="write", number=number) for number in range(4)]
    # Kimi's template writes an id with the call and with the result, Mistral's only once.
    expected = 2 if family == "kimi_k2" else 1
    assert [engine.prompt().count(id) for id in ids] == [expected] * 4


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("opencode_chat_1", ["say hello"]),
        ("opencode_chat_2", ["say hello", '"name": "grep"']),
        ("codex_responses", ["say hello", "multi_agent_v1__close_agent", "exec_command"]),
    ],
)
def test_recorded_requests_of_agents_are_answered(name, shown, thinking):
    request = json.loads((DATA / "requests" / f"{name}.json").read_text())
    engine = FakeEngine(thinking, ["x</think>Hello"])
    with client(engine) as server:
        answer = server.post(request["path"], json=request["body"], headers=request["headers"])
    talk = Responses() if "responses" in request["path"] else Chat()
    assert talk.read(talk.streamed(answer.text)).text == "Hello"
    assert all(word in engine.prompt() for word in shown)
    assert engine.prompt().rstrip().endswith("<think>")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA])
def test_an_error_ends_a_stream(target, path):
    text = post(FakeEngine(target, error=RuntimeError("no")), path, ask(path, stream=True)).text
    last = json.loads(text.splitlines()[-1]) if path == OLLAMA else frames(text)[-1]
    last = last.get("response", last)
    assert "RuntimeError: no" in json.dumps(last["error"]) and "[DONE]" not in text


PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
URL = "data:image/png;base64,iVBORw0KGgo="
# An image in a user's own message, in each API.
IMAGES = {
    Chat: {"type": "image_url", "image_url": {"url": URL}},
    Responses: {"type": "input_image", "image_url": URL},
    Messages: {"type": "image", "source": PNG},
}


def conversation_with_result(api, result):
    """A conversation in which a tool returned this."""
    talk = api("Look at it.")
    call = {"id": "t", "name": "view", "arguments": "{}"}
    if api is Chat:  # as opencode sends an image
        talk.items += [{"role": "assistant", "tool_calls": [{"id": "t", "function": call}]}]
        talk.result("t", "Image read successfully", False)
        talk.items.append(user([{"type": "text", "text": "From the tool:"}, *result]))
    elif api is Responses:  # as Codex does
        talk.items.append({"type": "function_call", "call_id": "t"} | call)
        talk.result("t", result, False)
    else:
        use = {"type": "tool_use", "id": "t", "name": "view", "input": {}}
        talk.items.append({"role": "assistant", "content": [use]})
        talk.result("t", result, False)
    return talk


@pytest.mark.parametrize("api", IMAGES)
def test_an_image_in_the_history_becomes_a_line_of_text(engine, api):
    """An image in the newest message is refused."""
    path = api.path
    image = IMAGES[api]
    answer = {"role": "assistant", "content": "No."}
    content = [{"type": "input_text" if api is Responses else "text", "text": "this"}, image]
    viewed = conversation_with_result(api, [image]).items
    with client(engine) as server:
        for history in (viewed, [*viewed, user("2+2?")], [user(content), answer, user("2+2?")]):
            response = server.post(path, json=ask(path, *history))
            assert response.status_code == 200, response.text
            assert engine.prompt().count("[image: this model reads text only]") == 1
        for newest in ([image], content):
            response = server.post(path, json=ask(path, *viewed, user("2+2?"), user(newest)))
            assert response.status_code == 400 and "'image'" in response.json()["error"]["message"]


def test_documents_audio_and_searches_become_a_line_of_text(engine):
    pdf = {"type": "document", "source": {**PNG, "media_type": "application/pdf"}}
    audio = user([{"type": "input_audio", "input_audio": {}}])
    search = {"type": "web_search_call", "id": "w"}
    for path, kind, items in (
        (MESSAGES, "document", conversation_with_result(Messages, [pdf]).items),
        (CHAT, "audio", [audio, {"role": "assistant"}, user("So?")]),
        (RESPONSES, "web_search_call", [user("Search."), search, user("So?")]),
    ):
        assert post(engine, path, ask(path, *items)).status_code == 200
        assert f"[{kind}: this model reads text only]" in engine.prompt()


class SlowJob(FakeJob):
    """An answer that begins after its response has sent two pings."""

    pings = 0

    async def __aiter__(self):
        while SlowJob.pings < 2:
            await asyncio.sleep(0)
        async for event in super().__aiter__():
            yield event


def is_empty(event):
    [choice] = event["choices"]
    return choice.get("delta", {}) == {} and not choice.get("text") and not choice["finish_reason"]


PINGS = {
    CHAT: is_empty,
    COMPLETIONS: lambda event: is_empty(event) and "x_dflash" not in event,
    RESPONSES: lambda event: event["type"] == "response.in_progress",
    MESSAGES: lambda event: event["type"] == "ping",
}


@pytest.mark.parametrize("path", PINGS)
def test_a_silent_stream_sends_events(engine, path, monkeypatch):
    """Before an answer begins, pings keep the connection alive.

    They are events, not comments: Codex, for example, gives up on a stream of comments only.
    """
    monkeypatch.setattr(sse, "PING_SECONDS", 0)
    monkeypatch.setattr("serving.FakeJob", SlowJob)
    monkeypatch.setattr(SlowJob, "pings", 0)
    with_pings = sse._with_pings

    def with_counted_pings(response):
        original_ping = response.ping

        def ping():
            SlowJob.pings += 1
            return original_ping()

        response.ping = ping
        return with_pings(response)

    monkeypatch.setattr(sse, "_with_pings", with_counted_pings)
    text = post(engine, path, ask(path, stream=True)).text
    events = frames(text)
    pings = [event for event in events if PINGS[path](event)]
    assert len(pings) > 1
    assert not any(line.startswith(":") for line in text.splitlines()), "comments"
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        ids = {event["id"] for event in events if "id" in event}
        assert len(ids) == (path != MESSAGES)
