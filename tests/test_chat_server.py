"""A chat with a server: turns, reasoning, what is too long, what stops."""

import pytest
from program import run

from dflash_mlx.cli.chat_commands import obey, reader
from dflash_mlx.cli.chat_loop import Chat
from dflash_mlx.cli.chat_server import Served
from dflash_mlx.errors import PromptError, ServerError


class Told:
    """A server whose answers are told; keeps what it was asked."""

    url, model = "http://there/v1", "m"

    def __init__(self, *deltas, reason="stop", error=None):
        self.deltas, self.reason, self.error = deltas, reason, error
        self.asked, self.closed = [], False

    def parts(self, messages, **settings):
        self.asked.append((list(messages), settings))
        try:
            if self.error is not None:
                raise self.error
            for delta in self.deltas:
                drafted = {"tokens": 3, "accepted": 2, "drafted": 7}
                yield {"choices": [{"delta": delta}], "x_dflash": drafted}
            yield {"choices": [{"delta": {}, "finish_reason": self.reason}]}
            yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 8}}
        finally:
            self.closed = True


def chat_with(server):
    settings = dict(temperature=0.5, top_p=1.0, top_k=4, min_p=0.0, seed=7, max_tokens=20, stop=())
    return Chat(Served(server, settings), obey, reader)


def test_every_turn_sends_the_conversation(capsys):
    server = Told({"role": "assistant"}, {"content": "Hel"}, {"content": "lo"})
    chat = chat_with(server)
    chat.dialogue.set_system("Be brief.")
    for line in ("one", "two"):
        chat.take_turn(line)
    assert capsys.readouterr().out == "Hello\nHello\n"
    messages, settings = server.asked[1]
    assert [one["content"] for one in messages] == ["Be brief.", "one", "Hello", "two"]
    assert settings == {"temperature": 0.5, "top_p": 1.0, "seed": 7, "max_tokens": 20, "top_k": 4}
    stats = chat.dialogue.last.stats
    assert stats.output_tokens == 8 and stats.prompt_tokens == 9 and stats.rounds == 1
    assert stats.accepted_tokens == 2 and stats.drafted_tokens == 7
    for command in ("/stats", "/compare", "/retry", "/set seed 9"):
        assert obey(chat, command)
    told = capsys.readouterr().err
    assert "not for a server's" in told and server.asked[2][1]["seed"] == 8
    assert "tok/s" not in told, "all of it was there at once: that is no speed"


def test_a_conversation_with_a_server_is_saved_loaded_and_taken_back(tmp_path):
    chat = chat_with(Told({"content": "Hello"}))
    chat.take_turn("one")
    for command in (f"/save {tmp_path / 'talk.json'}", "/undo", f"/load {tmp_path / 'talk.json'}"):
        assert obey(chat, command)
    assert [one["content"] for one in chat.dialogue.messages] == ["one", "Hello"]
    assert obey(chat, "/undo") and not chat.dialogue.messages


def test_reasoning_is_shown_and_not_sent_back(capsys):
    deltas = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}]
    chat = chat_with(Told(*deltas))
    chat.take_turn("so?")
    assert capsys.readouterr().out == "<think>Hm.</think>Yes\n"
    assert chat.dialogue.messages[-1] == {"role": "assistant", "content": "Yes"}


def test_what_goes_wrong_ends_a_pipe_and_not_a_person(capsys):
    for told, kind in (("(400): context_length_exceeded", PromptError), ("no more", ServerError)):
        chat = chat_with(Told(error=ServerError(told)))
        with pytest.raises(kind):
            chat.take_turn("hi")
        chat = chat_with(Told(error=ServerError(told)))
        chat.interactive = True
        chat.take_turn("hi")
        assert chat.dialogue.messages == [] and "error: " in capsys.readouterr().err


def test_whoever_stops_has_the_server_stop():
    server = Told({"content": "a"}, {"content": "b"})
    dialogue = chat_with(server).dialogue
    events = dialogue.stream(dialogue.ask("hi"))
    assert next(events).text == "a" and not server.closed
    events.close()
    assert server.closed and dialogue.messages[-1]["content"] == "a"


@pytest.mark.parametrize(
    "options",
    ["--draft lookup", "--no-draft", "--target-bits 4", "--draft-bits 4 --quant-mode mxfp4"]
    + ["--draft-bits 4 --group-size 32", "--exact", "--offline", "--stock-blas", "--kv-bits 4"]
    + ["--block-size 4", "--tree-budget 4", "--no-policy", "--verbose"],
)
def test_what_the_server_has_chosen_is_not_chosen_here(options):
    done = run("chat", "--server", "localhost:9", *options.split(), stdin="hi")
    told = " ".join(done.stderr.replace("│", "").split())
    assert done.returncode == 2 and "that is the server's affair" in told
    assert all(one in told for one in options.split() if one.startswith("--"))


def test_a_key_is_a_servers():
    done = run("chat", "--api-key", "x", stdin="hi")
    assert done.returncode == 2 and "goes with --server" in done.stderr


def test_limits_are_told(capsys):
    chat = chat_with(Told({"content": "a"}, reason="length"))
    chat.take_turn("hi")
    assert "cut off by --max-tokens" in " ".join(capsys.readouterr().err.split())


def test_help_has_no_command_that_only_refuses(capsys):
    chat = chat_with(Told())
    obey(chat, "/help")
    assert "/compare" not in capsys.readouterr().err
