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


class Faulty(SharedBatch):
    """A device that lacks memory in each forward with a prompt of `blamed` or more tokens.

    In its `stuck`th forward it waits until it is freed.
    """

    def __init__(self, target, blamed=10**9, stuck=0):
        super().__init__(target, None)
        self.blamed = blamed
        self.stuck = stuck
        self.count = 0
        self.waiting = threading.Event()
        self.freed = threading.Event()

    def verify(self, turns, tokens=None):
        self.count += 1
        if any(turn.request.stats.prompt_tokens >= self.blamed for turn in turns):
            raise NotEnoughMemoryError("boom")
        if self.count == self.stuck:
            self.waiting.set()
            assert self.freed.wait(60)
        return super().verify(turns, tokens)


@pytest.fixture(scope="module")
def pair():
    return dm.load("tiny")


def engine_of(pair, **faults):
    engine = dm.Engine(*pair, batch=Faulty(pair[0], **faults))
    engine.target = pair[0]
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
    body = ask(COMPLETIONS, prompt=prompt, max_tokens=tokens)
    with engine_of(pair) as engine, client(engine) as server:
        [told] = server.post(COMPLETIONS, json=body | {"logprobs": 0}).json()["choices"]
        chunks = frames(server.post(COMPLETIONS, json=body | {"stream": True}).text)
    offsets = told["logprobs"]["text_offset"]
    parts = told["logprobs"]["tokens"]
    assert told["text"] == "".join(parts)
    assert [told["text"][offset:] for offset in offsets] == [
        "".join(parts[n:]) for n in range(tokens)
    ]
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == told["text"]
    )


def test_ollamas_api_gives_the_answer_of_openais(pair):
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
    begun = "Let us add 47 and 38 digit"
    turns = user(question), {"role": "assistant", "content": begun}
    with engine_of(pair) as engine, client(engine) as server:
        asked = ask(MESSAGES, *turns, max_tokens=4)
        [told] = server.post(MESSAGES, json=asked).json()["content"]
        more = asked | {"continue_final_message": True}
        [same] = server.post(CHAT, json=more).json()["choices"]
        assert same["message"]["content"] == told["text"]
        whole = ask(CHAT, turns[0], max_tokens=60)
        answer = server.post(CHAT, json=whole).json()["choices"][0]
    assert (begun + told["text"]).startswith("Let us add 47 and 38 digit by digit")
    assert answer["message"]["content"].startswith(begun + " by digit")


def test_a_forward_without_memory_ends_only_the_answers_that_are_too_long(pair):
    """Requests that share a round with one that is too long read their text again and continue."""

    async def answers_of(blamed):
        with engine_of(pair, blamed=blamed) as engine:
            async with running(engine) as server:
                long = "What is 37 plus 48? " * 8
                questions = ["What is 37 plus 48?", long, "What is 12 plus 9?", long]
                asked = (
                    ask_server(server, question, stream=index == 3)
                    for index, question in enumerate(questions)
                )
                answers = await asyncio.gather(*asked)
                assert not server.handler.busy
                return answers

    sound = asyncio.run(answers_of(10**9))
    faulty = asyncio.run(answers_of(60))
    for number in (0, 2):
        right, choices = (json.loads(answers[number][1])["choices"] for answers in (sound, faulty))
        assert faulty[number][0] == 200 and choices == right
    (status, text) = faulty[1]
    (_, stream) = faulty[3]
    assert status == 400 and "boom" in json.loads(text)["error"]["message"]
    assert "boom" in stream and "[DONE]" not in stream


async def test_health_reports_a_device_that_hangs(pair):
    """Also after all clients left, and a new client does not restart the clock."""

    with engine_of(pair, stuck=2) as engine:
        handler = make_handler(engine)
        endpoints = Endpoints(models_of(handler), handler.metrics, 0.05)
        stream = await handler.start([GenerationRequest("m", "What", {"max_tokens": 24})])
        device = engine._scheduler._batch
        await asyncio.to_thread(device.waiting.wait, 60)
        stream.close()
        async with asyncio.timeout(30):
            while (answer := await endpoints.health(None)).status_code == 200:
                await asyncio.sleep(0.01)
        assert b"stalled" in answer.body and not handler.busy
        seconds = handler.seconds_since_step
        another = await handler.start([GenerationRequest("m", "What", {"max_tokens": 2})])
        assert handler.seconds_since_step > seconds
        device.freed.set()
        assert [step async for step in another.steps()][-1].reason is not None
        async with asyncio.timeout(30):
            while handler.seconds_since_step:
                await asyncio.sleep(0)
        assert (await endpoints.health(None)).status_code == 200
