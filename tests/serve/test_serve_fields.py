"""Every field of the APIs' newest schemas is used, refused, or ignored for a stated reason.

tests/data/api_fields.json has the names of the fields that openai 3.57, anthropic 2.14 and ollama
0.6.3 know, those in a field behind a dot.
"""

import json
import tomllib
from pathlib import Path

import make_docs
import pytest
from dialects import CHAT, COMPLETIONS, GENERATE, MESSAGES, OLLAMA, RESPONSES, ask, user
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, client, make_target, post

APIS = json.loads((Path(__file__).parents[1] / "data" / "api_fields.json").read_text())
IGNORED = {
    name for names in tomllib.loads(make_docs.IGNORED.read_text()).values() for name in names
}
BODIES = {body.__doc__.split(" and ")[0]: body for body in make_docs.BODIES}
REQUEST = {"model": "fake", "prompt": "Hi", "input": "Hi", "messages": [user("Hi")]}
REQUEST["max_tokens"] = 9
ABSENT = "absent"


def request(api):
    table = make_docs.support(BODIES[api], depth=1)
    return {name: value for name, value in REQUEST.items() if table.get(name, "yes") != "refused"}


REPEAT = {"repeat_penalty": 1.5, "repeat_last_n": -1}
OPTIONS = {"temperature": 0.5, "top_k": 4, "seed": 7, "num_predict": 9, "stop": ["x"]}
OPTIONS |= {"repeat_penalty": 1.5, "repeat_last_n": 30, "num_ctx": 4096, "num_thread": 2}
MEANT = {"temperature": 0.5, "top_k": 4, "seed": 7, "max_tokens": 9, "stop": ["x"]}
MEANT |= {"repetition_penalty": 1.5, "repetition_context_size": 30}


@pytest.mark.parametrize(
    ("path", "sent", "meant"),
    [
        (CHAT, {"max_completion_tokens": 5, "top_p": 0.9, "stop": "x"}, {"stop": ["x"]}),
        (CHAT, {"max_completion_tokens": 5, "top_p": 0.9}, {"max_tokens": 5, "top_p": 0.9}),
        (CHAT, {"seed": -1, "temp": 0.2}, {"seed": None, "temperature": 0.2}),
        (CHAT, {"seed": 2**32 + 4, "top_k": -1}, {"seed": 4, "top_k": 0}),
        (CHAT, {"logit_bias": {"17": 3}}, {"logit_bias": {17: 3.0}}),
        (CHAT, REPEAT, {"repetition_penalty": 1.5, "repetition_context_size": 2**31 - 1}),
        (CHAT, {"draft": False}, {"block_size": 1}),
        (RESPONSES, {"draft": False}, {"block_size": 1}),
        (RESPONSES, {"draft": True}, {"block_size": ABSENT}),
        (CHAT, {"stop": ""}, {"stop": ABSENT}),
        (CHAT, {"stop": [""]}, {"stop": ABSENT}),
        (CHAT, {"stop": []}, {"stop": ABSENT}),
        (CHAT, {"max_tokens": -1}, {"max_tokens": 7}),
        (COMPLETIONS, {"max_tokens": -1}, {"max_tokens": 7}),
        (CHAT, {}, {"max_tokens": 7, "temperature": 0.1}),
        (COMPLETIONS, {}, {"max_tokens": 16}),  # OpenAI's default
        (RESPONSES, {"max_output_tokens": -1}, {"max_tokens": 7}),
        (MESSAGES, {"stop_sequences": ["x", ""], "top_k": 3}, {"stop": ["x"], "top_k": 3}),
        (OLLAMA, {"options": OPTIONS}, MEANT),
        (GENERATE, {"options": OPTIONS}, MEANT),
        (OLLAMA, {"options": {"num_predict": -1}}, {"max_tokens": 7}),
        (OLLAMA, {"options": OPTIONS | {"repeat_penalty": 1}}, {"repetition_context_size": ABSENT}),
    ],
)
def test_what_fields_mean_to_the_engine(target, path, sent, meant):
    engine = FakeEngine(target)
    answer = post(engine, path, ask(path, **sent), defaults={"max_tokens": 7, "temperature": 0.1})
    assert answer.status_code == 200, answer.text
    [(_, settings)] = engine.submitted
    assert {name: settings.get(name, ABSENT) for name in meant} == meant


def test_answers_of_one_request_have_seeds_of_their_own(engine):
    post(engine, CHAT, ask(CHAT, n=2, seed=2**32 - 1))
    assert [settings["seed"] for _, settings in engine.submitted] == [2**32 - 1, 0]


@pytest.fixture(scope="module")
def server():
    with client(FakeEngine(make_target(json_tools))) as found:
        yield found


@pytest.mark.parametrize(
    ("api", "field"), [(api, field) for api, fields in APIS.items() for field in fields]
)
def test_a_field_is_used_refused_or_ignored_for_a_reason(api, field):
    table = make_docs.support(BODIES[api], depth=3)
    parts = field.split(".")
    covered = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    refused = any(table.get(name) == "refused" for name in covered)
    assert field in table or refused or covered & IGNORED


@pytest.mark.parametrize("api", APIS)
def test_fields_do_as_the_table_says(server, api):
    path, table = api.split()[1], make_docs.support(BODIES[api], depth=1)
    for name, text in table.items():
        if text.startswith(("refused", "only")):
            answer = server.post(path, json=request(api) | {name: "x"})
            assert answer.status_code == 400 and name in answer.text, name
            assert not text.startswith("refused") or f"{name}: is not supported" in answer.text
    ignored = {name: {"a": 1} for name in IGNORED - set(table) if "." not in name}
    answer = server.post(path, json=request(api) | ignored)
    assert answer.status_code == 200, answer.text
