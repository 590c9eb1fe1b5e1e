"""`dflash-mlx chat` in a pipe, its commands, and how an answer is written."""

import json
import re
from importlib.resources import files

import pytest
import tinymodels
from program import run
from program import start as start_program

from dflash_mlx.cli import options
from dflash_mlx.cli.chat_commands import obey, reader
from dflash_mlx.cli.chat_dialogue import Dialogue
from dflash_mlx.cli.chat_loop import Chat
from dflash_mlx.cli.chat_writer import DIM, NORMAL, Writer, ribbon
from dflash_mlx.cli.counters import drafting
from dflash_mlx.cli.pair import Pair
from dflash_mlx.events import Stats
from dflash_mlx.loop import generate
from dflash_mlx.machine.blas import BlasInfo

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
SUM = "What is 47 plus 38?"

embedded = pytest.mark.skipif(
    not files("dflash_mlx").joinpath("tiny", "drafter", "model.safetensors").is_file(),
    reason="THE EMBEDDED PAIR IS MISSING: train it with recipes/train_tiny.sh",
)


@embedded
def test_a_pipe():
    lines = [SUM, "What is 12 minus 5?", "", "exit", "What is 30 plus 1?"]
    done = start_program("chat", stdin="\n".join(lines))
    assert done.returncode == 0 and not CONTROL.search(done.stdout + done.stderr)
    answers = [line for line in done.stdout.splitlines() if line.startswith("So ")]
    assert answers[0] == "So 47 + 38 = 85." and answers[1] == "So 12 - 5 = 7."
    assert answers[-1] == "So 30 + 1 = 31.", "what comes through a pipe is never a command"
    assert done.stderr.count("new, ") == 4 and "new, 0 kept" in done.stderr
    assert "plain" not in done.stdout and re.search(r"~\d+\.\dx plain", done.stderr)


def test_a_pipe_has_the_librarys_own_text(pair):
    done = run("chat", "-n", "8", *pair, stdin="one\ntwo")
    messages = [{"role": "user", "content": "one"}]
    target = tinymodels.target()
    first = generate(target, None, messages, max_tokens=8).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = generate(target, None, messages, max_tokens=8).text
    assert done.stdout == f"{first}\n{second}\n"
    assert "8 tokens · " in done.stderr and "cut off by --max-tokens" in done.stderr


def small_chat() -> Chat:
    """A chat with a person, whose target answers eight tokens of nonsense."""
    pair = Pair(tinymodels.target(max_position_embeddings=128), None, None, BlasInfo("", None, ""))
    settings = options.Sampling().settings() | {"max_tokens": 8}
    chat = Chat(Dialogue(pair, settings), obey, reader)
    chat.interactive = True
    return chat


@pytest.fixture
def chat() -> Chat:
    return small_chat()


def say(chat, *lines):
    """Lines of a person, and what they are told about each."""
    for line in lines:
        if not obey(chat, line):
            chat.take_turn(line)


def roles(chat):
    return [message["role"] for message in chat.dialogue.messages]


def test_undo_clear_and_system(chat, capsys):
    say(chat, "/undo", "/retry", "/compare", "/stats")
    told = capsys.readouterr().err
    assert told.count("\n") == 4 and "Nothing to undo" in told and "no question yet" in told
    say(chat, "/system be brief", "hi", "ho", "/undo")
    assert roles(chat) == ["system", "user", "assistant"]
    say(chat, "/clear")
    assert roles(chat) == ["system"]
    say(chat, "/system none", "hi")
    assert roles(chat) == ["user", "assistant"]


def told(chat, capsys, *lines):
    """What a person is told about some lines."""
    capsys.readouterr()
    say(chat, *lines)
    return capsys.readouterr().err


def test_the_system_message_is_shown_set_and_removed(chat, capsys):
    assert "no system message" in told(chat, capsys, "/system")
    assert told(chat, capsys, "/system be\nbrief") == "The system message is set.\n"
    assert chat.dialogue.messages == [{"role": "system", "content": "be\nbrief"}]
    assert told(chat, capsys, "/system") == "be\nbrief\n" and roles(chat) == ["system"]
    say(chat, "/system none")
    assert roles(chat) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sytem be brief", "did you mean /system?"),
        ("/quitt", "did you mean /quit?"),
        ("/zzz", "/help lists the commands."),
        ("/nope", "/help lists the commands."),
        ("/temperature 0.5", "did you mean /set temperature?"),
        ("/?", "/undo     forget the last question"),
        (" /sytem", None),
        ("/etc/hosts holds what?", None),
        ("/help\nis the first line of this file", None),
        ("/* a comment */", None),
    ],
)
def test_what_is_almost_a_command_is_no_message(chat, capsys, line, said):
    heard = told(chat, capsys, line)
    assert (said or "8 tokens") in heard
    assert roles(chat) == ([] if said else ["user", "assistant"])


@pytest.mark.parametrize(
    ("line", "leaves"),
    [
        ("exit", True),
        ("quit ", True),
        ("/exit", True),
        ("/bye", True),
        (" exit", False),
        ("exit code?", False),
    ],
)
def test_a_word_alone_leaves_as_in_other_programs(chat, line, leaves):
    say(chat, line)
    assert chat.leaving == leaves and roles(chat) == ([] if leaves else ["user", "assistant"])


def test_settings_are_shown_and_set(chat, capsys):
    settings = chat.dialogue.settings
    shown = told(chat, capsys, "/set")
    assert shown.count("\n") == 6 and "temperature  0.0" in shown and "seed         none" in shown
    assert told(chat, capsys, "/set parameter temperature 0.7") == "temperature  0.7\n"
    assert told(chat, capsys, "/set temperature 0.8") == "temperature  0.8\n"
    assert settings["temperature"] == 0.8 and settings["seed"] is not None, "/retry needs one"
    say(
        chat, "/set top_p 0.9", "/set top_k 5", "/set min_p 0.1", "/set seed 3", "/set max_tokens 2"
    )
    assert "2 tokens" in told(chat, capsys, "hi")
    assert chat.dialogue.last.stats.seed == 3 and settings["top_k"] == 5


@pytest.mark.parametrize(
    "wrong",
    ["temperature hot", "temperature -1", "temperature nan", "top_p 7", "top_k 1.5", "min_p 2"]
    + ["top_k 99999", "seed -1", "max_tokens -1", "max_tokens many", "temprature 1", "temprature"],
)
def test_a_bad_setting_is_one_line_and_changes_nothing(chat, capsys, wrong):
    before = dict(chat.dialogue.settings)
    heard = told(chat, capsys, f"/set {wrong}")
    assert heard.startswith("error: ") and heard.count("\n") == 1
    assert chat.dialogue.settings == before


def test_a_setting_that_changes_nothing_is_said(chat, capsys):
    assert "top_k changes nothing" in told(chat, capsys, "/set top_k 5")
    say(chat, "/set temperature 1")
    assert told(chat, capsys, "/set top_k 5") == "top_k        5\n"
    assert told(chat, capsys, "/set max_tokens 5") == "max_tokens   5\n"


def test_a_chat_outlives_what_its_settings_cannot_do(chat, capsys):
    say(chat, "hi")
    chat.dialogue.settings |= {"top_k": 99_999, "temperature": 1.0, "seed": 1}
    heard = told(chat, capsys, "ho")
    assert heard.startswith("error: top_k 99999") and heard.count("\n") == 1
    assert roles(chat) == ["user", "assistant"], "the question is asked again when that is mended"


def test_what_no_answer_could_be_chosen_by_is_refused_at_the_start(pair):
    done = run("chat", "-t", "1", "--top-k", "99999", *pair, stdin="")
    assert done.returncode and "vocabulary" in done.stderr and not done.stdout


@pytest.mark.parametrize("line", ["/undo twice", "/quit now", "/stats all"])
def test_what_stands_behind_a_command_is_not_dropped(chat, capsys, line):
    say(chat, "hi")
    assert "stands alone" in told(chat, capsys, line)
    assert roles(chat) == ["user", "assistant"] and not chat.leaving


def test_a_seed_is_drawn_anew_when_it_is_taken_away(chat, capsys):
    settings = chat.dialogue.settings
    assert told(chat, capsys, "/set seed 3", "/set seed none").endswith("seed         none\n")
    say(chat, "/set temperature 0.8", "/set seed 3", "/set seed none")
    assert settings["seed"] not in (None, 3), "sampling has one"


def test_a_comparison_is_with_the_settings_of_the_answer(capsys):
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), None, BlasInfo("", None, ""))
    chat = Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 16}), obey, reader)
    heard = told(chat, capsys, "hi", "/set temperature 1.5", "/compare")
    assert "the text is identical" in heard
    heard = told(chat, capsys, "/retry", "/set temperature 0", "/compare")
    assert "the text is identical" in heard


def test_an_answer_of_one_token_has_no_speed(capsys):
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), None, BlasInfo("", None, ""))
    chat = Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 1}), obey, reader)
    heard = told(chat, capsys, "hi", "/compare")
    assert "no round to time" in heard and "the text is identical" in heard


def test_without_a_drafter_there_is_nothing_to_compare(chat, capsys):
    assert told(chat, capsys, "hi", "/compare").endswith("error: Nothing drafts in this chat.\n")
    assert chat.plain is None


def test_plain_decoding_is_measured_again_every_few_answers(capsys, monkeypatch):
    drafter = tinymodels.random_drafter()
    pair = Pair(tinymodels.target(), drafter, None, BlasInfo("", None, ""))
    settings = options.Sampling().settings() | {"max_tokens": 4}
    chat = Chat(Dialogue(pair, settings), obey, reader)
    rates = iter([1e9, 1e-3])
    monkeypatch.setattr("dflash_mlx.cli.chat_loop.measure_plain", lambda pair: next(rates))
    heard = [told(chat, capsys, "hi") for _ in range(5)]
    assert all("~0.0x plain" in line for line in heard[:4])
    (ratio,) = re.findall(r"~([\d.]+)x plain", heard[4])
    assert float(ratio) > 100

    def interrupted(pair):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_mlx.cli.chat_loop.measure_plain", interrupted)
    chat.interactive = True
    say(chat, "hi", "hi", "hi")
    assert "4 tokens" in told(chat, capsys, "hi"), "the line about the answer, with the old rate"


def test_retry_takes_another_seed(chat):
    chat.dialogue.settings |= {"temperature": 1.0, "seed": 5}
    say(chat, "hi", "/retry")
    first, second = chat.dialogue.answers
    assert first.prompt == second.prompt and first.tokens != second.tokens
    assert chat.dialogue.settings["seed"] == 6 and roles(chat) == ["user", "assistant"]


def test_save_and_load(chat, tmp_path, capsys):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", "ho", f"/load {file}")
    assert json.loads(file.read_text())["messages"] == chat.dialogue.messages
    assert roles(chat) == ["user", "assistant"] and "2 messages loaded" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left"


def test_a_file_without_a_name_is_no_folder(chat, capsys):
    assert "needs a file's name" in told(chat, capsys, "/load")


@pytest.mark.parametrize("name", ["", "/dev/null/no/talk.json", "no/such/folder/talk.json"])
def test_what_cannot_be_saved_is_one_line(chat, capsys, name):
    say(chat, f"/save {name}".strip())
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1


def test_a_chat_goes_on_from_a_file_that_is_there(tmp_path):
    done = run("chat", "--resume", str(tmp_path / "talk.json"), "--model", "/nowhere")
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 and "talk.json: cannot be read" in done.stderr


@pytest.mark.parametrize(("model", "said"), [("another/one", True), (None, False), (7, False)])
def test_a_conversation_with_another_model_is_said(chat, capsys, tmp_path, model, said):
    file = tmp_path / "talk.json"
    say(chat, f"/save {file}")
    assert "was with" not in told(chat, capsys, f"/load {file}")
    file.write_text(json.dumps({"model": model, "messages": []}))
    assert ("was with another/one;" in told(chat, capsys, f"/load {file}")) == said
    done = run("chat", "--no-draft", "--resume", file)
    assert done.returncode == 0 and ("was with another/one; tiny" in done.stderr) == said


def test_a_speed_of_few_rounds_is_not_compared(capsys):
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), None, BlasInfo("", None, ""))
    chat = Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 3}), obey, reader)
    assert "plain" not in told(chat, capsys, "hi", "/set max_tokens 4")
    chat.plain = 1.0
    assert "plain" not in told(chat, capsys, "/set max_tokens 3", "hi")
    assert "x plain" in told(chat, capsys, "/set max_tokens 4", "hi")


@pytest.mark.parametrize(
    ("widths", "trees", "said"),
    [
        ({1: 12, 16: 5, 2: 1}, {}, "drafts in 6 of 18 rounds, mostly 16 rows"),
        ({1: 9, 5: 1, 16: 1}, {}, "drafts in 2 of 11 rounds, 5 to 16 rows"),
        ({1: 4, 16: 1}, {}, "drafts in 1 of 5 rounds, 16 rows"),
        ({31: 1}, {31: 1}, "drafts in 1 of 1 round, trees of 31 rows"),
        ({4: 1, 31: 3}, {31: 3}, "drafts in 4 of 4 rounds, mostly trees of 31 rows"),
        ({1: 3}, {}, "no drafts"),
    ],
)
def test_an_answer_that_was_drafted_in_few_rounds_is_not_called_undrafted(widths, trees, said):
    assert drafting(Stats(rounds=sum(widths.values()), widths=widths, trees=trees)) == said


def test_the_line_about_an_answer_says_how_it_was_drafted(capsys):
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), None, BlasInfo("", None, ""))
    chat = Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 8}), obey, reader)
    assert " · drafts in 6 of 7 rounds, 2 to 7 rows · " in told(chat, capsys, "hi")


def test_a_history_that_cannot_be_kept_is_said_once(tmp_path, capsys):
    from dflash_mlx.cli.chat_line import KeptHistory

    (tmp_path / "file").touch()
    kept = KeptHistory(tmp_path / "file" / "history")
    kept.keep("one")
    kept.keep("two")
    assert kept.get_strings() == ["one", "two"] and list(kept.load_history_strings()) == []
    heard = capsys.readouterr().err
    assert heard.count("\n") == 1 and heard.startswith("No history of what you type")


def test_a_history_is_its_persons_alone(tmp_path):
    from dflash_mlx.cli.chat_line import KeptHistory

    path = tmp_path / "chat" / "history"
    KeptHistory(path).keep("one\nmore")
    KeptHistory(path).keep("two")
    assert list(KeptHistory(path).load_history_strings()) == ["two", "one\nmore"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("editor", ["/no/such/editor", "false", "printf '", "cp /dev/null"])
def test_an_editor_that_fails_is_one_line(chat, capsys, monkeypatch, editor):
    monkeypatch.setenv("VISUAL", editor)
    heard = told(chat, capsys, "/edit draft")
    if editor.startswith("cp"):
        assert not heard and not chat.draft, "it runs, and leaves nothing"
    else:
        assert heard.startswith(f"error: {editor}: ") and heard.count("\n") == 1
        assert chat.draft == "draft", "nobody types it again"


def test_an_edited_message_is_text(chat, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EDITOR", f"cp {tmp_path / 'message'}")
    monkeypatch.delenv("VISUAL", raising=False)
    (tmp_path / "message").write_text("two\nlines\n")
    assert not told(chat, capsys, "/edit") and chat.draft == "two\nlines"
    (tmp_path / "message").write_bytes(b"\xff")
    assert "not text in UTF-8" in told(chat, capsys, "/edit")


def test_a_turn_that_does_not_fit_is_forgotten(chat, capsys):
    say(chat, "hi")
    capsys.readouterr()
    say(chat, "x" * 500)
    assert capsys.readouterr().err.count("\n") == 1 and roles(chat) == ["user", "assistant"]
    say(chat, "ho")
    assert roles(chat) == 2 * ["user", "assistant"]


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_thinking_is_dimmed_wherever_the_text_is_cut(capsys, size):
    text = "a <think>b <c</think>d < e"
    writer = Writer(("<think>", "</think>"))
    for start in range(0, len(text), size):
        writer.write(text[start : start + size])
    writer.end()
    written = capsys.readouterr().out
    assert written.replace(NORMAL + DIM, "") == f"a {DIM}<think>b <c</think>{NORMAL}d < e\n"


def test_thinking_that_the_prompt_began_and_a_pipe_that_dims_nothing(capsys):
    for styled, expected in ((True, f"{DIM}hm{NORMAL}"), (False, "hm")):
        writer = Writer(("<think>", "</think>"), thinking=True, styled=styled)
        writer.write("hm</think>yes")
        writer.end()
        written = capsys.readouterr().out
        assert written.startswith(expected) and written.endswith("yes\n")
        assert (DIM in written) == styled


def test_a_ribbon():
    assert ribbon([0, 15, 7], 15) == "▁█▄"
    assert ribbon([0] * 100, 15) == "…" + "▁" * 72
    assert ribbon([0], 0) == "▁"
