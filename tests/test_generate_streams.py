"""`generate` among other programs: what is piped in, what is streamed out, how often it decodes."""

import json
from functools import partial
from io import BytesIO, StringIO, TextIOWrapper
from itertools import count

import pytest
import tinymodels
from rich.console import Console
from typer.testing import CliRunner

from dflash_mlx.cli import generate as command
from dflash_mlx.cli import output
from dflash_mlx.cli.app import app
from dflash_mlx.cli.generate_question import read_prompt
from dflash_mlx.cli.generate_summary import plain_by_cost
from dflash_mlx.cli.pair import Pair
from dflash_mlx.errors import PromptError
from dflash_mlx.events import Stats
from dflash_mlx.loading.load import load
from dflash_mlx.loop import generate
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.widths import Policy

SUMMARIZE = "summarize this"
ASKED = (SUMMARIZE, "-n", "12")


def invoke(*arguments, stdin: str | bytes = ""):
    """`generate` in this process."""
    given = ["generate", *map(str, arguments)]
    return CliRunner().invoke(app, given, input=stdin, prog_name="dflash-mlx")


@pytest.fixture
def loaded(monkeypatch) -> Pair:
    """A pair that `generate` finds loaded."""
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), 4, BlasInfo("openblas", None, ""))
    monkeypatch.setattr(command, "open_pair", lambda *_: pair)
    return pair


def answer_to(loaded: Pair, text: str) -> str:
    """What plain decoding says."""
    return generate(loaded.target, None, [{"role": "user", "content": text}], max_tokens=12).text


@pytest.mark.parametrize(
    "arguments, stdin, wanted",
    [
        ([SUMMARIZE], "the notes\n", f"{SUMMARIZE}\n\nthe notes"),
        (["-f", "FILE"], "the notes\n", "of a file\n\nthe notes"),
        ([SUMMARIZE, "-f", "FILE"], "the notes", f"{SUMMARIZE}\n\nof a file\n\nthe notes"),
        ([SUMMARIZE, "-f", "-"], "the notes", f"{SUMMARIZE}\n\nthe notes"),
        (["-", "-f", "FILE"], "the notes", "the notes\n\nof a file"),
        (["-f", "FILE", "-f", "-", "-f", "FILE"], "notes", "of a file\n\nnotes\n\nof a file"),
        ([SUMMARIZE], " \n", SUMMARIZE),
        ([], "the notes\n", "the notes"),
        (["-"], "the notes\r\n", "the notes"),
        (["-f", "FILE"], "", "of a file"),
        ([], "\nthe notes\n\n", "\nthe notes\n"),
    ],
)
def test_what_is_piped_in_belongs_to_the_prompt(arguments, stdin, wanted, loaded, tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("of a file\n")
    given = [str(file) if one == "FILE" else one for one in arguments]
    done = invoke(*given, "-n", "12", stdin=stdin)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.removesuffix("\n") == answer_to(loaded, wanted)


def test_bytes_beside_a_prompt_are_not_dropped_in_silence():
    done = invoke(SUMMARIZE, stdin=b"\xff\xfe")
    assert done.exit_code == 2 and "What is piped in is not text in UTF-8" in done.stderr


def test_a_closed_stdin_is_no_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert read_prompt(SUMMARIZE, []) == SUMMARIZE
    with pytest.raises(PromptError, match="empty"):
        read_prompt("-", [])


def test_a_terminal_is_not_waited_for(monkeypatch):
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert read_prompt(SUMMARIZE, []) == SUMMARIZE


@pytest.mark.parametrize(("watched", "prompt"), [(True, "one"), (False, "one"), (True, None)])
def test_a_person_is_told_how_much_was_piped_in_beside_a_prompt(
    watched, prompt, monkeypatch, capsys
):
    """In a loop over a file's lines the first call takes all that are left."""
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"two\nthree\n")))
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched)
    assert read_prompt(prompt, []) == ("one\n\ntwo\nthree" if prompt else "two\nthree")
    said = "With 2 lines of standard input." in capsys.readouterr().err
    assert said == (watched and prompt is not None)


def test_it_decodes_once_unless_asked_to_compare(loaded, monkeypatch):
    runs = []
    monkeypatch.setattr(command, "_compare", lambda untaught: runs.append(untaught.run_plain()))
    once = invoke(*ASKED)
    assert not runs and "identical" not in once.stderr
    twice = invoke(*ASKED, "--compare")
    assert len(runs) == 1 and "identical to plain decoding: yes" in twice.stderr
    assert once.stdout == twice.stdout


def test_every_compared_run_knows_what_the_first_one_knew(loaded, monkeypatch):
    """Else the speed is that of a policy which this prompt has taught, the rounds the answer's."""
    costs, knew = Costs({64: {1: 1.0, 4: 1.0}}, {64: {1: 0.0, 4: 0.0}}), []

    class Watched(Policy):
        def start(self, *args, **settings):
            knew.append(self.describe(64))
            return super().start(*args, **settings)

    policy = Watched(costs, widest=4)
    pair = Pair(loaded.target, loaded.drafter, None, loaded.blas, policy=policy)
    monkeypatch.setattr(command, "open_pair", lambda *_: pair)
    assert invoke(*ASKED, "--compare").exit_code == 0
    assert len(knew) > 1 and knew.count(knew[0]) == len(knew)
    assert policy.describe(64) != knew[0]  # the answer itself has taught it


def test_the_speedup_by_measured_costs_is_marked(loaded, monkeypatch):
    """By what rounds cost beside plain ones, however busy the machine was when it measured."""
    costs = Costs({64: {1: 250.0, 4: 250.0}}, {64: {1: 0.0, 4: 0.0}})  # a plain token as a round
    pair = Pair(loaded.target, loaded.drafter, None, loaded.blas, policy=Policy(costs, widest=4))
    monkeypatch.setattr(command, "open_pair", lambda *_: pair)
    with monkeypatch.context() as patched:  # every look at the clock is a hundredth of a second on
        patched.setattr("time.perf_counter", partial(next, count(0.0, 0.01)))
        lines = invoke(*ASKED).stderr.splitlines()
    [plain, drafted] = [line for line in lines if "tok/s" in line]
    assert "~plain" in plain and " 0 tok/s" not in plain
    assert (
        "DFlash" in drafted and 0.3 < float(drafted.partition("tok/s ~")[2].partition("x")[0]) < 9
    )
    compared = invoke(*ASKED, "--compare").stderr
    assert "~" not in compared and "identical" in compared


@pytest.mark.parametrize("seconds, speedup", [(0.25, 1.0), (0.4, 1.6), (9.0, 2.0)])
def test_the_speedup_by_costs_is_no_more_than_the_tokens_of_a_round(loaded, seconds, speedup):
    """Seen on a machine that had been busier when it measured: 1.15x by rounds of one token."""
    costs = Costs({64: {1: seconds, 4: seconds}}, {64: {1: 0.0, 4: 0.0}})
    pair = Pair(loaded.target, loaded.drafter, None, loaded.blas, policy=Policy(costs, widest=4))
    stats = Stats(output_tokens=13, rounds=6, decode_seconds=3.0)
    assert stats.tokens_per_second / plain_by_cost(pair, stats) == pytest.approx(speedup)


def test_without_costs_no_speedup_is_claimed(loaded):
    [speed] = [line for line in invoke(*ASKED).stderr.splitlines() if "tok/s" in line]
    assert "DFlash" in speed and "~" not in speed


def test_one_round_is_one(loaded):
    assert "2 tokens: the first, then 1.0 in 1 round" in invoke(SUMMARIZE, "-n", "2").stderr


@pytest.mark.parametrize("compare", [[], ["--compare"]])
def test_the_first_token_is_no_rounds(loaded, compare):
    told = invoke(SUMMARIZE, "-n", "1", *compare).stderr
    assert "1 token (cut off" in told and "tok/s" not in told and "round:" not in told


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_the_panel_fits_any_terminal(columns, loaded, monkeypatch):
    console = Console(file=StringIO(), width=columns)
    monkeypatch.setattr(output, "stderr", lambda: console)
    title = "a-model · block size as large as pays · numpy-openblas"
    rows = [("~plain", 12_345.0, ""), ("DFlash", 54_321.0, "~4.40x")]
    console.print(output.panel(title, output.speeds(rows)))
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= columns
    assert len(lines) == 4 and "54,321 tok/s ~4.40x" in lines[2]


def test_standard_streams_by_name(loaded):
    done = invoke(*ASKED, "-o", "-")
    assert done.exit_code == 0 and done.stdout.removesuffix("\n") == answer_to(loaded, SUMMARIZE)


def test_a_line_of_json_for_the_first_token_and_every_round(loaded, tmp_path):
    done = invoke(*ASKED, "--json-lines", "--stats")
    *lines, end = map(json.loads, done.stdout.splitlines())
    names = ["first", *["round"] * end["stats"]["rounds"], "end"]
    assert not done.stderr and [one["event"] for one in (*lines, end)] == names
    assert "".join(one["text"] for one in lines) == end["text"] == answer_to(loaded, SUMMARIZE)
    assert [token for one in lines for token in one["tokens"]] == end["tokens"]
    file = tmp_path / "lines.jsonl"
    assert not invoke(*ASKED, "--json-lines", "--output", file).stdout
    *written, _ = map(json.loads, file.read_text().splitlines())
    assert written == lines


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_an_answer_fits_a_schema(monkeypatch, tmp_path):
    """Plain and drafted runs of one comparison are held to it by the same processor."""
    pytest.importorskip("llguidance")
    pair = Pair(*load("tiny"), 4, BlasInfo("openblas", None, ""))
    monkeypatch.setattr(command, "open_pair", lambda *_: pair)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    done = invoke("What is 12 plus 7?", "--json-schema", file, "--compare")
    assert done.exit_code == 0 and "identical to plain decoding: yes" in done.stderr
    assert 0 <= json.loads(done.stdout)["sum"] <= 99
    cut = invoke("What is 12 plus 7?", "--json-schema", file, "-n", 2)
    assert cut.exit_code == 2 and "The JSON is not whole: cut off by --max-tokens" in cut.stderr


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_schema_that_is_none(content, tmp_path):
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    done = invoke(SUMMARIZE, "--json-schema", file)
    assert done.exit_code == 1 and str(file) in done.stderr and done.stderr.count("\n") == 1


def test_a_schema_without_llguidance_is_known_before_a_model_is_loaded(tmp_path, monkeypatch):
    file = tmp_path / "schema.json"
    file.write_text("{}")
    monkeypatch.setattr("dflash_mlx.cli.generate_question.find_spec", lambda _: None)
    done = invoke(SUMMARIZE, "--json-schema", file, "--model", "no/such-model", "--offline")
    assert done.exit_code == 1 and "[structured]" in done.stderr and "no/such" not in done.stderr
