"""Every field of the APIs' newest schemas is used, refused, or ignored for a stated reason.

tests/data/api_fields.json has the names of the fields that openai 3.57, anthropic 2.14 and ollama
0.6.3 know, those in a field behind a dot.
"""

import json
import tomllib
from pathlib import Path

import make_docs
import pytest
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, client, make_target

APIS = json.loads((Path(__file__).parents[1] / "data" / "api_fields.json").read_text())
IGNORED = {
    name for names in tomllib.loads(make_docs.IGNORED.read_text()).values() for name in names
}
BODIES = {body.__doc__.split(" and ")[0]: body for body in make_docs.BODIES}
HI = [{"role": "user", "content": "Hi"}]
REQUEST = {"model": "fake", "prompt": "Hi", "input": "Hi", "messages": HI, "max_tokens": 9}


def request(api):
    table = make_docs.support(BODIES[api], depth=1)
    return {name: value for name, value in REQUEST.items() if table.get(name, "yes") != "refused"}


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
