"""OpenAI's completions over a fake engine."""

import pytest
from dialects import COMPLETIONS, ask
from serving import FakeEngine, client, frames, make_target

PATH = COMPLETIONS


def accumulated(chunks):
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return texts, reasons


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("One two", ["One two"]),
        (["One", "Two"], ["One", "Two"]),
        ([65, 66, 67], [[65, 66, 67]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_all_kinds_of_prompts(target, prompt, prompts):
    engine = FakeEngine(target)
    with client(engine) as server:
        answer = server.post(PATH, json=ask(PATH, prompt=prompt, n=2)).json()
        more = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = frames(server.post(PATH, json=ask(PATH, prompt=prompt, n=2, **more)).text)
    tokenizer = target.tokenizer
    ids = [one if isinstance(one, list) else tokenizer.encode(one) for one in prompts]
    asked = [prompt for prompt, _ in engine.submitted[: len(engine.submitted) // 2]]
    assert asked == [one for one in ids for _ in range(2)]
    texts = ["Hello world"] * 2 * len(ids)
    assert [one["text"] for one in answer["choices"]] == texts
    assert [one["index"] for one in answer["choices"]] == list(range(len(texts)))
    streamed, reasons = accumulated(chunks)
    assert streamed == dict(enumerate(texts)) and set(reasons.values()) == {"stop"}
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_one_refused_prompt_cancels_the_others(target):
    engine = FakeEngine(target)
    with client(engine) as server:
        answer = server.post(PATH, json=ask(PATH, prompt=["One", ""]))
        metrics = server.get("/metrics").text
    assert answer.status_code == 400 and engine.jobs[0].cancelled
    assert "dflash_open_answers 0.0" in metrics


def test_a_completion_is_the_text_as_it_is():
    thinks = make_target(thinking="")
    steps = ["<think>", "Hm</think>", "So."]
    with client(FakeEngine(thinks, steps)) as server:
        answer = server.post(PATH, json=ask(PATH)).json()
        chunks = frames(server.post(PATH, json=ask(PATH, stream=True)).text)
    assert answer["choices"][0]["text"] == "".join(steps)
    assert [one["choices"][0]["text"] for one in chunks] == steps
