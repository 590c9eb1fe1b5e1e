"""OpenAI's chat completions over a fake engine."""

import json
from pathlib import Path

import pytest
from serving import FakeEngine, client, frames, make_target
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import (
    DFlashError,
    NotEnoughMemoryError,
    PromptError,
    SettingsError,
)
from dflash_mlx.serve.logprobs import Vocabulary

PATH = "/v1/chat/completions"
REQUESTS = Path(__file__).parents[1] / "data" / "requests"


def ask(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture(scope="module")
def target():
    return make_target()


def accumulated(chunks):
    """The answer that the chunks of a stream are."""
    text, reasons, calls = {}, {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            text[index] = text.get(index, "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                calls.setdefault(index, []).append(call["function"])
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return text, reasons, calls


def test_a_complete_and_a_streamed_answer(target):
    engine = FakeEngine(target, ["Hel", "lo", " world"], cached=3)
    with client(engine) as server:
        answer = server.post(PATH, json=ask()).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = frames(server.post(PATH, json=ask(**options)).text)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hello world" and choice["finish_reason"] == "stop"
    text, reasons, _ = accumulated(chunks)
    assert text == {0: "Hello world"} and reasons == {0: "stop"}
    usage = answer["usage"]
    assert chunks[-1]["usage"] == usage and all(chunk["usage"] is None for chunk in chunks[:-1])
    tokens = len(target.tokenizer.encode("Hello world")) + 1  # and EOS
    assert usage["prompt_tokens"] == len(engine.submitted[0][0])
    assert usage["completion_tokens"] >= tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    predicted = usage["completion_tokens_details"]
    assert (
        predicted["accepted_prediction_tokens"] + predicted["rejected_prediction_tokens"]
        == (usage["completion_tokens"])
    )


def test_settings_reach_the_engine(target):
    engine = FakeEngine(target)
    with client(engine, defaults={"temperature": 0.5, "max_tokens": 7}) as server:
        server.post(PATH, json=ask(max_completion_tokens=5, top_p=0.9, stop="x", seed=-1))
        server.post(PATH, json=ask(logit_bias={"17": 3}, n=2, seed=4, top_k=-1, draft=False))
    (_, first), (_, second), (_, third) = engine.submitted
    assert first == {
        "temperature": 0.5,
        "max_tokens": 5,
        "top_p": 0.9,
        "stop": ["x"],
        "seed": 2**32 - 1,
    }
    assert second["seed"] == 4 and third["seed"] == 5
    assert second["logit_bias"] == {17: 3.0} and second["top_k"] == 0 and second["block_size"] == 1


def test_empty_stop_strings_are_dropped(target):
    engine = FakeEngine(target)
    with client(engine) as server:
        for stop in ("", [""], []):
            assert server.post(PATH, json=ask(stop=stop)).status_code == 200
    assert (
        not any(settings.get("stop") for _, settings in engine.submitted)
        and len(engine.submitted) == 3
    )


def test_several_answers(target):
    with client(FakeEngine(target)) as server:
        answer = server.post(PATH, json=ask(n=3)).json()
        text, reasons, _ = accumulated(frames(server.post(PATH, json=ask(n=3, stream=True)).text))
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert text == {0: "Hello world", 1: "Hello world", 2: "Hello world"}
    assert set(reasons.values()) == {"stop"}
    one = answer["usage"]["completion_tokens"] / 3
    assert one == int(one)


def test_all_roles_reach_the_template(target):
    engine = FakeEngine(target)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    with client(engine) as server:
        assert server.post(PATH, json=ask(messages=messages)).status_code == 200
    prompt = engine.prompt()
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt and "user\nAB<|im_end|>" in prompt
    assert '{"name": "f", "arguments": {"a": 1}}' in prompt  # in words, for this knows no tools
    assert "<tool_response>\n42\n</tool_response>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"n": 9}, "n"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "messages"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_unsupported_fields_are_refused(target, wrong, param):
    engine = FakeEngine(target)
    with client(engine) as server:
        answer = server.post(PATH, json=ask(**wrong))
    assert answer.status_code == 400 and not engine.submitted
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param


def test_fields_that_change_no_answer_are_ignored(target):
    same = {"store": True, "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"}
    with client(FakeEngine(target)) as server:
        body = ask(**same, never_heard_of=1, modalities=["text"], audio=None)
        assert server.post(PATH, json=body).status_code == 200


def test_clients_recognize_a_prompt_that_is_too_long():
    with client(FakeEngine(make_target(context=20))) as server:
        messages = [{"role": "user", "content": "word " * 50}]
        answer = server.post(PATH, json=ask(messages=messages))
        known = server.get("/v1/models").json()["data"][0]["context_length"]
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {known} tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["opencode_chat_1", "opencode_chat_2"])
def test_opencode(target, name):
    request = json.loads((REQUESTS / f"{name}.json").read_text())
    engine = FakeEngine(target)
    with client(engine) as server:
        answer = server.post(request["path"], json=request["body"], headers=request["headers"])
    chunks = frames(answer.text)
    assert accumulated(chunks)[0] == {0: "Hello world"} and chunks[-1]["usage"]
    prompt = engine.prompt()
    assert "say hello" in prompt and ('"name": "grep"' in prompt) == (name == "opencode_chat_2")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DFlashError("The engine has stopped."), "The engine has stopped."),
        (
            RuntimeError("[metal] boom"),
            "The answer could not be finished (RuntimeError: [metal] boom).",
        ),
    ],
)
def test_an_engine_error(target, error, told, caplog):
    engine = FakeEngine(target, ["Hello"], error=error)
    with client(engine) as server:
        answer = server.post(PATH, json=ask())
        last = frames(server.post(PATH, json=ask(stream=True)).text)[-1]
        metrics = server.get("/metrics").text
    assert answer.status_code == 500 and answer.json() == last
    assert last["error"]["message"] == told
    assert "dflash_open_answers 0.0" in metrics and "dflash_request_failure_total 2.0" in metrics
    # With its cause, whatever is asked for; that a stream's status was 200 tells nobody.
    logged = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(logged) == 2 and all(one.exc_info[1].args == (told,) for one in logged)


@pytest.mark.parametrize(
    "error", [SettingsError("No."), PromptError("No."), NotEnoughMemoryError("No.")], ids=type
)
def test_settings_that_the_engine_refuses_are_400(target, error):
    class Refuses(FakeEngine):
        def submit(self, prompt, **settings):
            raise error

    with client(Refuses(target)) as server:
        answer = server.post(PATH, json=ask())
        metrics = server.get("/metrics").text
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "No."
    assert "dflash_request_failure_total 0.0" in metrics


def test_more_answers_than_the_capacity_are_400(target):
    three = {"prompt": ["One", "Two", "Three"]}
    with client(FakeEngine(target), capacity=2) as server:
        for path, body in ((PATH, ask(n=3)), ("/v1/completions", three)):
            never = server.post(path, json=body)
            assert never.status_code == 400 and "not 3" in never.json()["error"]["message"]
        assert server.post(PATH, json=ask(n=2)).status_code == 200
        assert server.post(PATH, json=ask(n=2)).status_code == 200  # the slots came back


def test_an_unforeseen_error_frees_the_slots(target):
    class Breaks(FakeEngine):
        def submit(self, prompt, **settings):
            if self.submitted:
                raise KeyError("bug")
            return super().submit(prompt, **settings)

    engine = Breaks(target)
    with client(engine, capacity=2) as server:
        assert server.post(PATH, json=ask(n=2)).status_code == 500
        assert engine.jobs[0].cancelled
        assert "dflash_open_answers 0.0" in server.get("/metrics").text


def test_log_probabilities_have_the_spaces_of_sentencepiece():
    pieces = ["Hello", "\u2581world", "\u2581", "\ufffd", "<0xE2>"]
    vocabulary = BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(vocabulary)
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    found = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    bytes_ = [found.bytes_of(token) for token in range(len(pieces))]
    assert bytes_ == [b"Hello", b" world", b" ", "\ufffd".encode(), b"\xe2"]
