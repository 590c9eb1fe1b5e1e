"""A chat with a server: turns, reasoning, errors, and stopping."""

import pytest

from dflash_mlx.bench.server_bench import ServerClient
from dflash_mlx.cli.chat_commands import run_command
from dflash_mlx.cli.chat_conversation import Chat, ServedModel
from dflash_mlx.errors import PromptError, ServerError


class ScriptedServer:
    """A server with fixed answers, which records its requests."""

    url = "http://there/v1"
    model = "m"
    stream = ServerClient.stream

    def __init__(self, *deltas, reason="stop", error=None):
        self.deltas = deltas
        self.reason = reason
        self.error = error
        self.requests = []
        self.closed = False

    def chunks(self, messages, **settings):
        self.requests.append((list(messages), settings))
        try:
            if self.error is not None:
                raise self.error
            for delta in self.deltas:
                yield {"choices": [{"delta": delta}]}
            yield {"choices": [{"delta": {}, "finish_reason": self.reason}]}
            yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 8}}
        finally:
            self.closed = True


@pytest.fixture
def chat_with(monkeypatch):
    def chat(server):
        monkeypatch.setattr(ServerClient, "find", lambda *_: server)
        settings = {"temperature": 0.5, "top_p": 1.0, "top_k": 4, "min_p": 0.0, "seed": 7}
        model = ServedModel("localhost", None, None)
        return Chat(model, settings | {"max_tokens": 20, "stop": ()}, [])

    return chat


def test_every_turn_sends_the_conversation(chat_with, capsys):
    server = ScriptedServer({"role": "assistant"}, {"content": "Hel"}, {"content": "lo"})
    chat = chat_with(server)
    chat.set_system("Be brief.")
    for line in ("one", "two"):
        chat.ask(line)
    shown = capsys.readouterr()
    assert shown.out == "Hello\nHello\n" and "8 tokens" in shown.err and "9 new" in shown.err
    messages, settings = server.requests[1]
    assert [message["content"] for message in messages] == ["Be brief.", "one", "Hello", "two"]
    assert settings == {"temperature": 0.5, "top_p": 1.0, "top_k": 4, "seed": 7, "max_tokens": 20}
    chat.change({"temperature": 0.0, "top_k": 0})
    chat.ask("three")
    assert server.requests[2][1]["temperature"] == 0 and "top_k" not in server.requests[2][1]
    assert run_command(chat, "/retry") and server.requests[3][1]["seed"] == 8


def test_reasoning_is_shown_and_not_sent_back(chat_with, capsys):
    deltas = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}]
    chat = chat_with(ScriptedServer(*deltas))
    chat.ask("so?")
    assert capsys.readouterr().out == "Hm.\nYes\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("message", "kind"), [("(400): context_length_exceeded", PromptError), ("no", ServerError)]
)
def test_an_error_ends_a_pipe_but_not_an_interactive_chat(chat_with, capsys, message, kind):
    chat = chat_with(ScriptedServer(error=ServerError(message)))
    with pytest.raises(kind):
        chat.ask("hi")
    chat.interactive = True
    chat.ask("hi")
    assert chat.messages == [] and "error: " in capsys.readouterr().err


def test_closing_a_stream_closes_the_servers_response(chat_with):
    server = ScriptedServer({"content": "a"}, {"content": "b"})
    chat = chat_with(server)
    pieces = chat.model.stream([{"role": "user", "content": "hi"}], chat.settings)
    assert next(pieces).content == "a" and not server.closed
    pieces.close()
    assert server.closed


def test_an_answer_that_reaches_max_tokens_is_reported(chat_with, capsys):
    chat = chat_with(ScriptedServer({"content": "a"}, {"content": "b"}, reason="length"))
    chat.ask("hi")
    stderr = capsys.readouterr().err
    assert "8 tokens" in stderr and "cut off by --max-tokens" in stderr
    assert "tok/s" not in stderr, "tokens that arrive at once have no speed"


def test_think_says_that_a_server_may_have_no_such_switch(chat_with, capsys):
    chat = chat_with(ScriptedServer())
    run_command(chat, "/think on")
    assert "may have no such switch" in capsys.readouterr().err
