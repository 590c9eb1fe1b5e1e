"""OpenAI's chat completions over a fake engine."""

import pytest
from dialects import CHAT, ask
from serving import FakeEngine, client, frames
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import (
    DFlashError,
    NotEnoughMemoryError,
    PromptError,
    SettingsError,
)
from dflash_mlx.serve.logprobs import token_bytes


@pytest.mark.parametrize("usage", [False, True])
def test_the_usage_of_several_answers(target, usage):
    """The last chunk has it where the client wants it, and all others say that they have none."""
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": usage}}
    with client(FakeEngine(target, cached=3)) as server:
        whole = server.post(CHAT, json=ask(CHAT, n=3)).json()
        chunks = frames(server.post(CHAT, json=ask(CHAT, **options)).text)
    assert [one["message"]["content"] for one in whole["choices"]] == ["Hello world"] * 3
    texts, reasons = [""] * 3, set()
    for choice in [one for chunk in chunks for one in chunk["choices"]]:
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons.add(choice["finish_reason"])
    assert texts == ["Hello world"] * 3 and reasons == {None, "stop"}
    assert [one.get("usage") for one in chunks if one["choices"]] == [None] * (len(chunks) - usage)
    assert not usage or chunks[-1]["usage"] == whole["usage"]
    tokens, details = (
        whole["usage"]["completion_tokens"],
        whole["usage"]["completion_tokens_details"],
    )
    assert tokens % 3 == 0 and tokens == sum(
        details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")
    )
    assert whole["usage"]["total_tokens"] == tokens + whole["usage"]["prompt_tokens"]


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
        answer = server.post(CHAT, json=ask(CHAT))
        last = frames(server.post(CHAT, json=ask(CHAT, stream=True)).text)[-1]
        metrics = server.get("/metrics").text
    assert answer.status_code == 500 and answer.json() == last
    assert last["error"]["message"] == told
    assert "dflash_open_answers 0.0" in metrics and "dflash_request_failure_total 2.0" in metrics
    # With its cause, whatever is asked for; that a stream's status was 200 tells nobody.
    logged = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(logged) == 2 and all(told in one.getMessage() for one in logged)
    traced = isinstance(error, RuntimeError)  # ours says all there is to say
    assert all(bool(one.exc_info) is traced for one in logged)


@pytest.mark.parametrize(
    "error", [SettingsError("No."), PromptError("No."), NotEnoughMemoryError("No.")], ids=type
)
def test_settings_that_the_engine_refuses_are_400(target, error):
    class Refuses(FakeEngine):
        def submit(self, prompt, **settings):
            raise error

    with client(Refuses(target)) as server:
        answer = server.post(CHAT, json=ask(CHAT))
        metrics = server.get("/metrics").text
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "No."
    assert "dflash_request_failure_total 0.0" in metrics


def test_more_answers_than_the_capacity_are_400(target):
    three = {"prompt": ["One", "Two", "Three"]}
    with client(FakeEngine(target), capacity=2) as server:
        for path, body in ((CHAT, ask(CHAT, n=3)), ("/v1/completions", three)):
            never = server.post(path, json=body)
            assert never.status_code == 400 and "not 3" in never.json()["error"]["message"]
        assert server.post(CHAT, json=ask(CHAT, n=2)).status_code == 200
        assert server.post(CHAT, json=ask(CHAT, n=2)).status_code == 200  # the slots came back


def test_an_unforeseen_error_frees_the_slots(target):
    class Breaks(FakeEngine):
        def submit(self, prompt, **settings):
            if self.submitted:
                raise KeyError("bug")
            return super().submit(prompt, **settings)

    engine = Breaks(target)
    with client(engine, capacity=2) as server:
        assert server.post(CHAT, json=ask(CHAT, n=2)).status_code == 500
        assert engine.jobs[0].cancelled
        assert "dflash_open_answers 0.0" in server.get("/metrics").text


def test_log_probabilities_have_the_spaces_of_sentencepiece():
    pieces = ["Hello", "\u2581world", "\u2581", "\ufffd", "<0xE2>"]
    vocabulary = BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(vocabulary)
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    bytes_ = [token_bytes(fast, token) for token in range(len(pieces))]
    assert bytes_ == [b"Hello", b" world", b" ", "\ufffd".encode(), b"\xe2"]
