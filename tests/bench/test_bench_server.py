"""Benchmarking an OpenAI-compatible server: a small one on the loopback, which may also fail."""

import json
from pathlib import Path

import jsonschema
import pytest
from program import run
from webserver import web_server

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.server_bench import ServerClient, measure_concurrency, measure_server
from dflash_mlx.errors import ServerError

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text())
HI = [{"role": "user", "content": "hi"}]


class ChatServer:
    """Answers every question with the same parts.

    Attributes:
        deltas: the parts of the answer.
        usage: the reported token counts; None reports none.
        ending: the last lines of the stream.
        status: the HTTP status of answers.
        requests: the bodies of all chat requests.
    """

    def __init__(self) -> None:
        self.deltas = [{"role": "assistant"}, {"content": "Hel"}, {"content": "lo"}]
        self.usage = {"prompt_tokens": 7, "completion_tokens": 5}
        self.ending = b"data: [DONE]\n\n"
        self.status = 200
        self.requests = []
        self.models = {"data": [{"id": "some-model"}]}

    def answer(self, request):
        """The status, body and headers that `web_server` sends."""
        if request.command == "GET":
            body = json.dumps(self.models).encode()
            return 200 if request.path == "/v1/models" else 404, [body], {}
        self.requests.append(json.loads(request.body))
        if self.status != 200 or request.path != "/v1/chat/completions":
            return self.status, [b'{"error": "too\n busy"}'], {}
        parts = [{"choices": [{"delta": delta}]} for delta in self.deltas]
        parts.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if self.usage is not None:
            parts.append({"choices": [], "usage": self.usage})
        lines = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)
        return 200, [b": a comment\n\n" + lines + self.ending], {}


@pytest.fixture
def chat():
    chat = ChatServer()
    with web_server(chat.answer) as chat.url:
        yield chat


def test_an_answer_has_its_text_counts_and_times(chat):
    client = ServerClient.find(f"{chat.url}/v1/", None)
    assert client == ServerClient(f"{chat.url}/v1", "some-model")
    assert client == ServerClient.find(chat.url.removeprefix("http://"), None)
    answer = client.ask(HI, 9, 0.5, 3)[0]
    [request] = chat.requests
    assert request["messages"] == HI
    assert (request["max_tokens"], request["temperature"], request["seed"]) == (9, 0.5, 3)
    assert request["stream"] is True and request["model"] == "some-model"
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.stats.prompt_tokens, answer.stats.output_tokens) == (7, 5)
    assert 0 < answer.stats.first_token_seconds < 60
    assert answer.stats.decode_seconds == 0  # all parts came in one read, so no speed is known


def test_without_usage_the_parts_are_counted_including_reasoning(chat):
    chat.deltas = [{"reasoning_content": "hm"}, {"content": "a"}, {"content": "b"}]
    chat.usage = None
    answer = ServerClient(f"{chat.url}/v1", "x").ask(HI, 9, 0.0, 3)[0]
    assert answer.text == "hmab" and answer.stats.output_tokens == 3
    assert "seed" not in chat.requests[-1]  # mlx-lm's server does not batch requests with a seed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"status": 503}, r"refuses \(503\): .*too busy"),
        ({"ending": b""}, "before its end"),
        ({"ending": b"data: {nonsense\n\n"}, "broke off"),
        ({"ending": b'data: {"error": "out of memory"}\n\n'}, "out of memory"),
    ],
)
def test_the_error_of_a_failing_server_has_its_address_and_the_reason(chat, change, message):
    vars(chat).update(change)
    with pytest.raises(ServerError, match=message) as error:
        ServerClient(f"{chat.url}/v1", "x").ask(HI, 9, 0.0, 0)
    assert chat.url in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense://x", "http://[bad"])
def test_a_server_that_cannot_be_reached_or_has_no_model_is_an_error(url, chat):
    with pytest.raises(ServerError, match="cannot be reached"):
        ServerClient.find(url, None)
    chat.models = {"data": []}
    with pytest.raises(ServerError, match="--model"):
        ServerClient.find(chat.url, None)


def test_the_next_turn_of_a_prompt_contains_the_servers_answer(chat):
    prompt = BenchPrompt("talk", tuple(HI), then=("and now?",))
    first, second = measure_server(
        ServerClient(f"{chat.url}/v1", "x"),
        prompts=[prompt],
        repeats=2,
        max_tokens=9,
        temperature=0.0,
        seed=0,
    )
    assert len(chat.requests) == 5  # one to warm up, then two for each turn
    assert [message["content"] for message in second.prompt.messages] == ["hi", "Hello", "and now?"]
    assert len(first.runs["server"]) == 2 and first.speedups("server") == []


@pytest.mark.parametrize("exact", [True, False])
def test_bench_measures_a_server(exact, chat, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "run"
    prompts.write_text(json.dumps({"prompt": "hi", "answer": "Hello" if exact else "Hello there"}))
    options = ["--openai", chat.url, "--prompts", str(prompts), "--out", str(out), "--repeats", "2"]
    result = run("bench", *options, COLUMNS="200")
    assert result.returncode == 0, result.stderr
    assert "some-model" in result.stderr and f"{exact:d}/1" in result.stdout
    # A hint explains why an answer may not equal the known one.
    assert ("cut answers short" in result.stderr) == (not exact)
    # An answer that came in one read has no speed.
    assert result.stdout.splitlines()[-3].split()[:2] == ["all", "-"]
    content = json.loads((out / "bench.json").read_text())
    jsonschema.validate(content, SCHEMA)
    assert list(content["overall"]["methods"]) == ["server"]
    assert content["overall"]["exact"] == exact


def test_four_clients_send_two_requests_each_and_their_times_are_summarized(chat):
    prompts = [BenchPrompt("talk", ({"role": "user", "content": word},)) for word in "abc"]
    measured = measure_concurrency(
        ServerClient(f"{chat.url}/v1", "x"), prompts=prompts, clients=4, max_tokens=9
    )
    words = [body["messages"][0]["content"] for body in chat.requests]
    assert sorted(words) == ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    assert measured["requests"] == 8 and measured["tokens"] == 8 * 5
    assert measured["tokens_per_second"] == pytest.approx(40 / measured["seconds"], rel=0.1)
    assert measured["first_token_seconds"]["median"] > 0
    assert measured["gap_seconds"]["p95"] >= measured["gap_seconds"]["median"]
    chat.status = 500
    with pytest.raises(ServerError, match="500"):
        measure_concurrency(
            ServerClient(f"{chat.url}/v1", "x"), prompts=prompts, clients=2, max_tokens=9
        )


def test_bench_prints_a_row_for_each_number_of_clients(chat):
    """Or a JSON object; an invalid number is a usage error."""
    options = ["bench", "--openai", chat.url, "--concurrency"]
    result = run(*options, "1, 2", "--limit", "1", COLUMNS="80")
    assert result.returncode == 0, result.stderr
    head, first, second = result.stdout.splitlines()
    assert head.split()[:3] == ["clients", "tok/s", "first"]
    assert first.split()[0] == "1" and second.split()[0] == "2"
    result = run(*options, "2", "--limit", "1", "--json")
    [row] = json.loads(result.stdout)["concurrency"]
    assert row["clients"] == 2 and row["tokens"] == 5 * row["requests"]
    for invalid in ("0", "1,,2", ""):
        assert run(*options, invalid).returncode == 2
