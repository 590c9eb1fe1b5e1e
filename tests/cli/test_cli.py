"""The command line as people and scripts use it: a process, its two streams and its exit code."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import tinymodels
from program import HERE, PROGRAM, hear_ctrl_c, run, start

import dflash_mlx as dm
from dflash_mlx.cli.options import note_without_effect
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.errors import ModelNotFoundError, SettingsError
from dflash_mlx.loop import generate
from dflash_mlx.settings import SETTINGS

NO_MLX = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None;"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
QUESTION = "what is 37 + 48?"

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX uses Accelerate elsewhere")


def popen(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that reacts to Ctrl-C, even if the tests run with SIGINT ignored."""
    return subprocess.Popen(
        command,
        cwd=HERE,
        preexec_fn=hear_ctrl_c,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def background_job():
    """Ignore SIGINT in this process and its children, as in a shell's background job."""
    earlier_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, earlier_handler)


@pytest.fixture(scope="session")
def answer() -> str:
    """The 24 tokens of text with which the library answers QUESTION."""
    messages = [{"role": "user", "content": QUESTION}]
    return generate(tinymodels.target(), None, messages, max_tokens=24).text


def test_help_models_and_version_work_without_mlx():
    inspect = ["models", "--inspect", str(HERE.parent / "data" / "golden" / "dflash2")]
    runs = [["generate", "--help"], ["models"], inspect, ["--version"]]
    code = f"{NO_MLX} from dflash_mlx.cli.app import app;"
    code += f"[app(arguments, standalone_mode=False) for arguments in {runs}]"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=HERE)
    assert done.returncode == 0
    assert b"generate [OPTIONS]" in done.stdout and b"\ndflash-mlx 0" in done.stdout


def test_version():
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    shown = f"dflash-mlx {dm.__version__} ({libraries})\n"
    assert run("--version").stdout == shown
    command = [sys.executable, "-m", "dflash_mlx", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, cwd=HERE).stdout == shown


def test_models_says_what_is_downloaded(monkeypatch):
    copies = {"mlx-community/Qwen3-8B-4bit": 4_612_000_000, "z-lab/Qwen3-8B-DFlash-b16": 10**9}
    monkeypatch.setattr("dflash_mlx.loading.hub.Hub.copies", lambda _: copies)
    assert "Downloaded: Qwen3-8B." in run("models", "--memory", "16").stderr
    shown = run("models", "Qwen3-8B").stdout
    assert "downloaded         mlx-community/Qwen3-8B-4bit, 4.6 GB" in shown
    assert "downloaded         z-lab/Qwen3-8B-DFlash-b16, 1.0 GB" in shown
    listed = json.loads(run("models", "--json").stdout)["pairs"]
    [row] = [row for row in listed if row["downloaded"]]
    assert row["drafter_bytes"] == 10**9
    assert row["downloaded"] == {"mlx-community/Qwen3-8B-4bit": 4_612_000_000}


def test_inspecting_a_drafter(pair):
    folder = pair[3]
    shown = run("models", "--inspect", folder)
    assert shown.returncode == 0
    assert re.search(r"^block_size +16 +block_size *$", shown.stdout, re.MULTILINE)
    head = r"^head +the target's +no tensor lm_head.weight *$"
    assert re.search(head, shown.stdout, re.MULTILINE)
    printed = run("models", "--json", "--inspect", f"{folder}/config.json").stdout
    decisions = {decision["field"]: decision for decision in json.loads(printed)["decisions"]}
    assert decisions["target_layer_ids"]["value"] == [0, 2]
    assert decisions["target_layer_ids"]["source"].endswith("target_layer_ids")
    assert "DFlash2" in run("models", "--inspect", "tiny-dflash2").stdout
    elsewhere = run("models", "--inspect", "nobody/nothing")
    assert elsewhere.returncode == 1 and "dflash-mlx pull nobody/nothing" in elsewhere.stderr
    missing = run("models", "--inspect", "/no/such/folder")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1


def test_generate(pair, answer):
    done = start("generate", QUESTION, "-n", "24", "--compare", *pair)
    assert done.returncode == 0 and done.stdout == answer + "\n" * (not answer.endswith("\n"))
    assert "identical to plain decoding: yes" in done.stderr
    assert re.search(r"\d\.\d tokens per step in \d+ steps?, drafted by DFlash\b", done.stderr)
    assert re.search(r"plain .* tok/s", done.stderr) and re.search(r"drafted .*x", done.stderr)
    assert not CONTROL.search(done.stdout + done.stderr) and "arning" not in done.stderr


def test_generate_json(pair, answer):
    done = run("generate", "-n", "24", "--json", "--compare", *pair, stdin=QUESTION)
    content = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and not done.stderr
    assert content["text"] == answer and content["output_tokens"] == len(content["tokens"]) == 24
    assert content["identical"] is True and content["first_difference"] is None
    assert content["finish_reason"] == "length" and content["block_size"] == 16
    speedup = content["tokens_per_second"] / content["plain_tokens_per_second"]
    assert content["speedup"] == pytest.approx(speedup)


def test_generate_plainly_raw_and_stopped(pair):
    text = generate(tinymodels.target(), None, "user", max_tokens=24).text
    stop = text[5:8]
    options = ["--no-chat-template", "--no-draft", "--stop", "~never~", "--stop", stop]
    options += ["--json", "-n", "24"]
    content = json.loads(run("generate", "user", *options, *pair[:2]).stdout)
    assert content["text"] == text[: text.index(stop)] and content["finish_reason"] == "stop"
    assert content["block_size"] == 1 and content["speedup"] is None


@linux
def test_the_stock_blas_can_be_kept(pair):
    options = ["-n", "8", "-b", "5", "--json", "--stock-blas"]
    chosen = start("generate", QUESTION, *options, *pair)
    content = json.loads(chosen.stdout)
    assert (content["blas"], content["block_size"]) == ("stock", 5)
    assert "slow products" not in chosen.stderr


@linux
def test_a_warning_says_that_without_a_compiler_products_are_slow(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")  # without a compiler
    monkeypatch.setenv("HOME", str(tmp_path))
    warning = start("generate", QUESTION, "-n", "1", *pair).stderr
    assert "MLX multiplies with its own slow products" in warning and "install gcc" in warning
    assert "use_fast_blas" not in warning, "a function that only users of the library can call"


# Each of these returns the arguments of a `generate` that fails. They are called with an empty
# folder, and the folders of a target and its drafter.


def with_broken_file(name, damage):
    """Arguments with a copy of the target in which one file is damaged."""

    def arguments(folder: Path, target: str, drafter: str) -> list[str]:
        copy = shutil.copytree(target, folder / "copy")
        damage(copy / name)
        return ["hi", "--model", str(copy), "--draft", drafter]

    return arguments


def with_drafter_of_another_target(folder: Path, target: str, drafter: str) -> list[str]:
    other = tinymodels.save_drafter(folder / "other", hidden_size=32, num_attention_heads=2)
    return ["hi", "--model", target, "--draft", str(other)]


def with_unknown_model(folder: Path, target: str, drafter: str) -> list[str]:
    return ["hi", "-m", "no/where", "--draft", drafter]


def with_too_long_a_prompt(folder: Path, target: str, drafter: str) -> list[str]:
    return ["x" * 9000, "-m", target, "-d", drafter]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (with_unknown_model, 1, "no/where"),
        (with_too_long_a_prompt, 2, "8191"),
        (with_drafter_of_another_target, 1, "hidden_size"),
        (with_broken_file("model.safetensors", Path.unlink), 1, "model.safetensors"),
        (with_broken_file("model.safetensors", truncate), 1, "truncated"),
        (with_broken_file("config.json", Path.unlink), 1, "config.json"),
        (with_broken_file("chat_template.jinja", Path.unlink), 2, "--no-chat-template"),
    ],
)
def test_errors_are_one_line(arguments, code, message, pair, tmp_path):
    done = run("generate", *arguments(tmp_path, pair[1], pair[3]))
    assert done.returncode == code and not done.stdout and message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_a_closed_pipe_at_stdout_is_not_reported_as_an_error(pair):
    """As in `dflash-mlx generate | head -1`: nothing is written to stderr, the exit code is 1."""
    command = [*PROGRAM, "generate", QUESTION, "-n", "4000", "--no-policy", *pair]
    with popen(command) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 1


@linux
def test_a_full_disk_at_stdout_is_an_error():
    command = f"{shlex.join(PROGRAM)} models >/dev/full"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, cwd=HERE)
    assert done.returncode == 1
    assert done.stderr == "error: stdout: No space left on device.\n"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_like_an_empty_one(closed, pair, tmp_path):
    """Services and cron jobs may start programs with closed streams.

    A file that is opened later must not take the number of a closed stream.
    """
    saved = tmp_path / "answer.txt"
    command = [*PROGRAM, "generate", QUESTION, "-n", "8", "--output", str(saved), *pair]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": HERE}
    done = subprocess.run(f"{shlex.join(command)} {closed}", shell=True, **options)
    expected = run("generate", QUESTION, "-n", "8", *pair)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == "" and saved.read_text() == expected.stdout


# The program, which also prints a space when it starts to import the commands.
ANNOUNCED = """
import sys
from dflash_mlx.cli.main import main
class Announcer:
    def find_spec(self, name, *rest):
        if name == "dflash_mlx.cli.app":
            print(" ", flush=True)
sys.meta_path.insert(0, Announcer())
main()
"""


@pytest.mark.parametrize("moment", ["starting", "decoding"])
def test_ctrl_c_exits_with_130_and_without_a_traceback(moment, pair, background_job):
    program = [*PROGRAM[:2], ANNOUNCED] if moment == "starting" else PROGRAM
    with popen([*program, "generate", QUESTION, "-n", "4000", "--no-policy", *pair]) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"" and process.wait(60) == 130


SAMPLED = ["-t", "1.0", "--top-p", "0.9", "--seed", "7"]


def test_a_seed_gives_the_same_text_as_in_the_library(pair):
    messages = [{"role": "user", "content": QUESTION}]
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 16}
    expected = generate(tinymodels.target(), None, messages, **settings)
    asked = ["generate", QUESTION, "-n", "16", "--json", "--compare", *SAMPLED]
    content = json.loads(run(*asked, *pair).stdout)
    assert (content["tokens"], content["seed"]) == (expected.tokens, 7)
    assert content["identical"] is True


def test_a_seed_that_was_drawn_is_reported(pair):
    asked = ["generate", QUESTION, "-n", "4", "-t", "1.0", "--json", "--compare", "--verbose"]
    done = run(*asked, *pair)
    content = json.loads(done.stdout)
    assert content["identical"] is True and f"seed: {content['seed']}" in done.stderr


def test_the_policy_can_be_switched_off_and_does_not_change_the_text(pair):
    """With --no-policy or a --block-size, every step drafts a whole block."""

    def generate_json(*options):
        arguments = ["-n", "17", "--json", "--verbose", *pair, *options]
        done = run("generate", QUESTION, *arguments)
        measures_costs = "a plain step takes" in done.stderr
        return json.loads(done.stdout), measures_costs

    automatic, measures_costs = generate_json()
    assert measures_costs
    blocks, measures_costs = generate_json("--no-policy")
    assert not measures_costs
    fixed, measures_costs = generate_json("--block-size", "16")
    assert not measures_costs
    assert automatic["steps"] == automatic["rounds"]
    assert automatic["tokens_per_step"] == automatic["tokens_per_round"]
    assert automatic["tokens"] == blocks["tokens"] == fixed["tokens"]
    assert blocks["widths"] == fixed["widths"] and "16" in blocks["widths"]


def test_a_note_names_options_that_have_no_effect_at_temperature_0(capsys):
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    for settings in (
        {"temperature": 0.5, "seed": 7, "top_p": 0.9},
        {},
        {"repetition_penalty": 1.1},
    ):
        note_without_effect(defaults | settings)
        assert not capsys.readouterr().err
    note_without_effect(defaults | {"seed": 7, "top_p": 0.9})
    assert "--top-p, --seed has no effect" in capsys.readouterr().err


def test_the_note_that_the_default_model_is_a_toy_comes_once_a_day(monkeypatch, tmp_path):
    """A file records that it was shown. If none can be written, it is shown each time."""
    monkeypatch.setattr("dflash_mlx.cli.pair.cache_folder", lambda part: tmp_path / part)
    monday = Mock(today=lambda: date(2026, 11, 23))
    tuesday = Mock(today=lambda: date(2026, 11, 24))
    monkeypatch.setattr("dflash_mlx.cli.pair.date", monday)
    assert "toy" not in run("generate", "hi", "-n", "1", "--model", "tiny").stderr
    assert "tiny is a toy" in run("generate", "hi", "-n", "1").stderr
    assert "toy" not in run("generate", "hi", "-n", "1").stderr
    monkeypatch.setattr("dflash_mlx.cli.pair.date", tuesday)
    assert "tiny is a toy" in run("generate", "hi", "-n", "1").stderr
    (tmp_path / "said" / "toy").unlink()
    (tmp_path / "said" / "toy").mkdir()  # so that the file cannot be written
    assert "tiny is a toy" in run("generate", "hi", "-n", "1").stderr


def test_verbose_explains_the_draft_lengths_of_a_network_but_not_of_lookup():
    """The policy has no estimates of its own for lookup, which keeps them itself."""
    network = run("generate", QUESTION, "--verbose").stderr
    lookup = run("generate", QUESTION, "--verbose", "--draft", "lookup").stderr
    assert "\n8 rows: " in network and "\n8 rows: " not in lookup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tinymodels.save_target(tmp_path_factory.mktemp("some") / "model")


def test_lookup_drafts_for_a_model_without_a_known_drafter_and_a_note_says_so(folder):
    prompt = "user: user: user: what is 37 + 48?"
    options = ["-n", "40", "--json", "--no-policy", "--compare"]
    done = run("generate", prompt, "--model", folder, *options)
    content = json.loads(done.stdout)
    assert content["identical"] and max(map(int, content["widths"])) > 1
    [note] = [line for line in done.stderr.splitlines() if "lookup" in line]
    assert "No drafter is known" in note


def test_the_library_accepts_the_command_lines_names_of_drafters(folder):
    name = str(folder)
    with pytest.warns(UserWarning, match="no drafter is known for .*, so its text is drafted by"):
        assert isinstance(dm.load(name)[1], LookupDrafter)
    assert isinstance(dm.load(name, draft="lookup")[1], LookupDrafter)
    assert dm.load(name, draft="none")[1] is None
    for draft in (None, "+lookup", "tiny+lookup", "tiny-dflash2+lookup"):
        assert isinstance(dm.load("tiny", draft=draft)[1], CombinedDrafter)
    assert not isinstance(dm.load("tiny", draft="tiny")[1], CombinedDrafter)
    with pytest.raises(ModelNotFoundError, match="No model ''"):
        dm.load("tiny", draft="")


def test_meaningless_names_and_settings_of_drafters_are_refused(folder):
    with pytest.raises(SettingsError, match="name a network before"):
        dm.load(str(folder), draft="lookup+lookup")
    with pytest.raises(SettingsError, match="draft_bits means nothing to lookup"):
        dm.load(str(folder), draft="lookup", draft_bits=4)
    with pytest.raises(ModelNotFoundError, match="owner/name"):
        dm.load("a-mistyped-name")


@pytest.mark.parametrize(
    ("model", "draft"),
    [
        ("tiny", "a-mistyped-name"),
        ("tiny", "FOLDER"),  # of a target
        ("tiny", "Hikari07jp/DSpark-Gemma-4-31B-draft"),  # a drafter that we cannot load
        ("FOLDER", "tiny-dflash2"),  # a drafter of another target
    ],
)
def test_every_error_about_a_drafter_says_how_to_run_without_it(model, draft, folder):
    model = model.replace("FOLDER", str(folder))
    draft = draft.replace("FOLDER", str(folder))
    with pytest.raises(dm.DFlashError) as caught:
        dm.load(model, draft=draft)
    assert "--draft lookup" in str(caught.value) and "--draft none" in str(caught.value)
