"""A real server process with the embedded pair, asked with the SDKs of OpenAI and Anthropic."""

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest
from demands import QUESTION, cases, check
from program import run

LONG = [{"role": "user", "content": "x " * 4000}]
OPTIONS = ("--no-policy", "--stock-blas", "--port", "0", "--block-size", "8")


class ServerProcess:
    """A server process, and its URL. `last_output` is what it wrote after it was ready."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "dflash_mlx", "serve", *OPTIONS, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        output = ""
        for line in self.process.stderr:
            output += line
            match = re.search(r"http://127\.0\.0\.1:\d+", line)
            if match:
                self.url = match[0]
                return
        raise AssertionError(output)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        self.last_output = self.process.stderr.read()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    ranks = request.config.getoption("--ranks")
    hosts = ()
    if ranks > 1:
        file = tmp_path_factory.mktemp("hosts") / "hosts.json"
        file.write_text(json.dumps([{"ssh": "127.0.0.1"}] * ranks))
        hosts = ("--hosts", str(file))
    server = ServerProcess("--concurrency", "8", "--queue", "8", *hosts)
    yield server
    server.process.terminate()
    assert server.wait() == 0


@pytest.fixture(scope="module")
def chat(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_openai_chat(chat):
    story = [{"role": "user", "content": "Tell me of a turtle and of the sea."}]
    settings = {"model": "m", "messages": story, "max_tokens": 80, "seed": 3, "temperature": 1}
    settings |= {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat.chat.completions.create(**settings)
    usage = {"stream_options": {"include_usage": True}}
    with chat.chat.completions.stream(**settings, **usage) as stream:
        streamed = stream.until_done().get_final_completion()
    for complete, other in zip(whole.choices, streamed.choices, strict=True):
        assert complete.message.content == other.message.content != ""
        assert complete.finish_reason == other.finish_reason
        assert complete.logprobs.content == other.logprobs.content
        text = b"".join(bytes(token.bytes) for token in complete.logprobs.content).decode()
        assert text == complete.message.content
        for token in complete.logprobs.content:
            assert len(token.top_logprobs) == 2 and token.logprob <= 0
    assert whole.usage.total_tokens == streamed.usage.total_tokens
    tokens = sum(len(choice.logprobs.content) for choice in whole.choices)
    eos_tokens = sum(choice.finish_reason == "stop" for choice in whole.choices)
    assert whole.usage.completion_tokens == tokens + eos_tokens


def test_openai_completions_and_models(chat):
    settings = {"model": "m", "prompt": "What is 12 plus", "max_tokens": 12}
    whole = chat.completions.create(**settings, logprobs=2)
    parts = list(chat.completions.create(**settings, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == 12
    assert chat.models.list().data[0].id == "tiny" == chat.models.retrieve("tiny").id


def test_openai_responses(chat):
    settings = {"model": "m", "input": "What is 37 plus 48?", "max_output_tokens": 30}
    whole = chat.responses.create(**settings)
    with chat.responses.stream(**settings) as stream:
        for _ in stream:
            pass
    # The SDK's `get_final_response` works only if the answer was not cut.
    assert whole.status == "incomplete" and whole.output_text
    with chat.responses.stream(**settings | {"max_output_tokens": 200}) as stream:
        final = stream.get_final_response()
    whole = chat.responses.create(**settings | {"max_output_tokens": 200})
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert whole.status == "completed" and chat.responses.retrieve(whole.id).output == whole.output
    more = {"model": "m", "input": "And 2 plus 3?", "previous_response_id": whole.id}
    counted = chat.responses.input_tokens.count(**more).input_tokens
    assert counted == chat.responses.create(**more, max_output_tokens=4).usage.input_tokens > 80


@pytest.mark.parametrize(
    ("seeds", "step"), [(1, 7), pytest.param(5, 1, marks=pytest.mark.matrix, id="200")]
)
def test_schemas_and_forced_calls_validate(chat, claude, seeds, step):
    """Eight at a time. `pytest -m matrix tests/serve/test_serve_process.py` asks all 200."""
    selected = cases(seeds)[::step]
    assert len(selected) == (200 if step == 1 else 6)
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(check, chat, claude, *case) for case in selected]
        for future in futures:
            future.result(600)


def test_anthropic_messages(claude):
    settings = {"model": "m", "max_tokens": 60, "messages": QUESTION}
    whole = claude.messages.create(**settings)
    with claude.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 60
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="m", messages=QUESTION)
    for usage in (whole.usage, streamed.usage):
        assert usage.cache_read_input_tokens + usage.input_tokens == counted.input_tokens
    stopped = claude.messages.create(**settings, stop_sequences=["Ones"])
    assert stopped.stop_sequence == "Ones" and "Ones" not in stopped.content[0].text


def test_a_system_prompt_is_cached_for_later_requests_of_both_apis(chat, claude):
    """Claude Code's billing header, which differs in each session, is left out."""
    system = "Mind these rules. " * 80

    def prompt_and_cached_tokens(question):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = chat.chat.completions.create(model="m", messages=messages, max_tokens=8)
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens

    _, cached_before = prompt_and_cached_tokens("What is 3 plus 4?")
    tokens, cached = prompt_and_cached_tokens("What is 5 plus 6?")
    assert cached_before < 20 and tokens - 20 < cached < tokens
    billing = {"type": "text", "text": "x-anthropic-billing-header: differs;"}
    blocks = [billing, {"type": "text", "text": system}]
    usage = claude.messages.create(model="m", max_tokens=8, system=blocks, messages=QUESTION).usage
    assert usage.cache_read_input_tokens >= cached
    assert usage.cache_read_input_tokens + usage.input_tokens <= tokens + 9


def test_sdk_errors(chat, claude):
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model="m", messages=LONG)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="m", max_tokens=1, messages=LONG)
    with pytest.raises(openai.NotFoundError):
        chat.responses.retrieve("other")


def test_the_chat_command_as_a_client(server, chat):
    lines = "What is 37 plus 48?\nAnd 2 plus 3?\n"
    done = run("chat", "--server", server.url, "-n", "20", stdin=lines)
    asked = chat.chat.completions.create(model="m", messages=QUESTION, max_tokens=20)
    assert done.stdout.startswith(asked.choices[0].message.content)
    assert done.returncode == 0 and "20 tokens" in done.stderr


def test_sigterm_finishes_answers(server, chat):
    """This must be the last test, because it ends the server of all tests."""
    stream = chat.chat.completions.create(
        model="m", messages=QUESTION, max_tokens=600, stream=True, temperature=1, seed=5
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    *_, last = stream
    assert last.choices[0].finish_reason in ("stop", "length")
    assert server.wait() == 0
    assert "30 s" in server.last_output
    with pytest.raises(openai.APIConnectionError):
        chat.models.list()
