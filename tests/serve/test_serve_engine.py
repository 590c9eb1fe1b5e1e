"""The application over the real engine: texts, failing forwards, a device that hangs."""

import asyncio
import json
import threading

import httpx2
import pytest
from dialects import CHAT, COMPLETIONS, MESSAGES, OLLAMA, ask, user
from serving import client, frames, make_handler, models_of, running

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import NotEnoughMemoryError
from dflash_mlx.serve.generation_request import GenerationRequest
from dflash_mlx.serve.web_app import Endpoints

pytestmark = pytest.mark.anyio


class FaultyBatch(SharedBatch):
    """A batch whose forwards fail or hang.

    Args:
        failing_length: a forward runs out of memory if a prompt has this many tokens or more.
        hanging_forward: the number of a forward that hangs until `released` is set; 0 for none.
    """

    def __init__(self, target, failing_length=10**9, hanging_forward=0):
        super().__init__(target, None)
        self.failing_length = failing_length
        self.hanging_forward = hanging_forward
        self.forwards = 0
        self.hangs = threading.Event()
        self.released = threading.Event()

    def verify(self, turns, tokens=None):
        self.forwards += 1
        if any(turn.request.stats.prompt_tokens >= self.failing_length for turn in turns):
            raise NotEnoughMemoryError("boom")
        if self.forwards == self.hanging_forward:
            self.hangs.set()
            assert self.released.wait(60)
        return super().verify(turns, tokens)


@pytest.fixture(scope="module")
def pair():
    return dm.load("tiny")


def engine_of(pair, **faults):
    target, drafter = pair
    engine = dm.Engine(target, drafter, batch=FaultyBatch(target, **faults))
    engine.target = target
    return engine


async def ask_server(server, question, **more):
    """The status and the text of an answer."""
    body = ask(CHAT, user(question), max_tokens=24, **more)
    async with httpx2.AsyncClient(timeout=60) as web:
        answer = await web.post(f"http://127.0.0.1:{server.port}{CHAT}", json=body)
    return answer.status_code, answer.text


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("Hello there", 3), ("Ones: 7 +", 1), ("Ones: 7 +", 2), ("Let us add 4", 4)],
)
def test_completions_keep_the_first_space(pair, prompt, tokens):
    """Whole, in the log probabilities and their offsets, and streamed."""
    body = ask(COMPLETIONS, prompt=prompt, max_tokens=tokens)
    with engine_of(pair) as engine, client(engine) as server:
        [choice] = server.post(COMPLETIONS, json=body | {"logprobs": 0}).json()["choices"]
        chunks = frames(server.post(COMPLETIONS, json=body | {"stream": True}).text)
    text = choice["text"]
    parts = choice["logprobs"]["tokens"]
    assert text == "".join(parts)
    offsets = choice["logprobs"]["text_offset"]
    assert len(parts) == len(offsets) == tokens
    for number, offset in enumerate(offsets):
        assert text[offset:] == "".join(parts[number:])
    streamed = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(streamed) == text


def test_ollamas_api_and_openais_give_the_same_answer(pair):
    more = {"logprobs": True, "top_logprobs": 2}
    with engine_of(pair) as engine, client(engine) as server:
        theirs = server.post(CHAT, json=ask(CHAT, max_tokens=9, **more)).json()["choices"][0]
        more |= {"options": {"num_predict": 9}, "stream": False}
        ours = server.post(OLLAMA, json=ask(OLLAMA, **more)).json()
    assert ours["message"]["content"] == theirs["message"]["content"]
    assert ours["logprobs"] == theirs["logprobs"]["content"] and ours["done_reason"] == "length"
    assert ours["eval_count"] == 9 and 0 < ours["eval_duration"] < ours["total_duration"]


def test_a_prefilled_answer_is_continued(pair):
    question = "What is 47 plus 38?"
    beginning = "Let us add 47 and 38 digit"
    turns = (user(question), {"role": "assistant", "content": beginning})
    with engine_of(pair) as engine, client(engine) as server:
        request = ask(MESSAGES, *turns, max_tokens=4)
        [continuation] = server.post(MESSAGES, json=request).json()["content"]
        chat_request = request | {"continue_final_message": True}
        [choice] = server.post(CHAT, json=chat_request).json()["choices"]
        assert choice["message"]["content"] == continuation["text"]
        whole = ask(CHAT, turns[0], max_tokens=60)
        answer = server.post(CHAT, json=whole).json()["choices"][0]
    assert (beginning + continuation["text"]).startswith("Let us add 47 and 38 digit by digit")
    assert answer["message"]["content"].startswith(beginning + " by digit")


def test_a_forward_without_memory_ends_only_the_answers_that_are_too_long(pair):
    """Requests that share a round with one that is too long read their text again and continue."""

    long = "What is 37 plus 48? " * 8

    async def ask_four(failing_length):
        with engine_of(pair, failing_length=failing_length) as engine:
            async with running(engine) as server:
                answers = await asyncio.gather(
                    ask_server(server, "What is 37 plus 48?"),
                    ask_server(server, long),
                    ask_server(server, "What is 12 plus 9?"),
                    ask_server(server, long, stream=True),
                )
                assert not server.handler.busy
                return answers

    expected = asyncio.run(ask_four(10**9))
    first, failed, third, failed_stream = asyncio.run(ask_four(60))
    for (status, text), (_, expected_text) in ((first, expected[0]), (third, expected[2])):
        assert status == 200
        assert json.loads(text)["choices"] == json.loads(expected_text)["choices"]
    status, text = failed
    assert status == 400 and "boom" in json.loads(text)["error"]["message"]
    _, stream = failed_stream
    assert "boom" in stream and "[DONE]" not in stream


async def test_health_reports_a_device_that_hangs(pair):
    """It does so even after all clients left, and a new client does not restart the clock."""
    with engine_of(pair, hanging_forward=2) as engine:
        handler = make_handler(engine)
        endpoints = Endpoints(models_of(handler), handler.metrics, 0.05)
        stream = await handler.start([GenerationRequest("m", "What", {"max_tokens": 24})])
        batch = engine._scheduler._batch
        await asyncio.to_thread(batch.hangs.wait, 60)
        stream.close()
        async with asyncio.timeout(30):
            answer = await endpoints.health(None)
            while answer.status_code == 200:
                await asyncio.sleep(0.01)
                answer = await endpoints.health(None)
        assert b"stalled" in answer.body and not handler.busy
        seconds = handler.seconds_since_step
        another = await handler.start([GenerationRequest("m", "What", {"max_tokens": 2})])
        assert handler.seconds_since_step > seconds
        batch.released.set()
        assert [step async for step in another.steps()][-1].reason is not None
        async with asyncio.timeout(30):
            while handler.seconds_since_step:
                await asyncio.sleep(0)
        assert (await endpoints.health(None)).status_code == 200
