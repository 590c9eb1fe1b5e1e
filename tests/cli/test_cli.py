"""The command line as people and scripts use it: a process, its two streams and its exit code."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import tinymodels
from program import HERE, PROGRAM, hear_ctrl_c, run, start
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loop import generate

NO_MLX = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None;"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
QUESTION = "what is 37 + 48?"

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX uses Accelerate elsewhere")


def popen(command: list[str]) -> subprocess.Popen[bytes]:
    """A run to interfere with; it hears Ctrl-C even where the tests do not."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        cwd=HERE,
        preexec_fn=hear_ctrl_c,
    )


@pytest.fixture
def background_job():
    """Like a shell that starts a job in the background: SIGINT is ignored, by children too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def in_process(*arguments: str, stdin: str | bytes = ""):
    """A run without a new process, for what ends before MLX is needed."""
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="dflash-mlx")


def one_line_error(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The message of a run that failed as it should."""
    assert done.returncode == code and not done.stdout, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def answer() -> str:
    """What the library itself says to QUESTION in 24 tokens."""
    messages = [{"role": "user", "content": QUESTION}]
    return generate(tinymodels.target(), None, messages, max_tokens=24).text


def test_help_and_models_do_without_mlx():
    inspect = ["models", "--inspect", str(HERE.parent / "data" / "golden" / "dflash2")]
    runs = [["generate", "--help"], ["models"], inspect, ["--version"]]
    code = f"{NO_MLX} from dflash_mlx.cli.app import app;"
    code += f"[app(arguments, standalone_mode=False) for arguments in {runs}]"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=HERE)
    assert done.returncode == 0
    assert b"generate [OPTIONS]" in done.stdout and b"\ndflash-mlx 0" in done.stdout


def test_version():
    import dflash_mlx

    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    shown = f"dflash-mlx {dflash_mlx.__version__} ({libraries})\n"
    assert in_process("--version").output == shown
    command = [sys.executable, "-m", "dflash_mlx", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, cwd=HERE).stdout == shown


def test_models():
    listed = json.loads(in_process("models", "--json").stdout)
    assert listed["embedded"] == "tiny" and all(one["targets"] for one in listed["pairs"])
    shown = in_process("models", "--all").stdout
    assert all(Path(one["targets"][0]).name in shown for one in listed["pairs"])
    sizes = {one["targets"][0]: one["gigabytes"] for one in listed["pairs"]}
    assert sizes["Qwen/Qwen3-8B"] == {"4": 4.5, "8": 8.5, "16": 16}
    assert sizes["openai/gpt-oss-20b"] == dict.fromkeys(("4", "8", "16"), 13)  # its files
    [line] = [line for line in shown.splitlines() if line.startswith("Qwen3.5-9B")]
    said = next(one["fits"] for one in listed["pairs"] if "Qwen/Qwen3.5-9B" in one["targets"])
    assert line.split(maxsplit=4)[1:] == ["18.0", "9.6", "5.1", said]


def test_models_that_fit_come_first_by_family(monkeypatch):
    monkeypatch.setattr("dflash_mlx.loading.checks.usable_bytes", lambda: 24 * 10**9)
    monkeypatch.setattr("dflash_mlx.cli.models.Hub", partial(Hub, "http://127.0.0.1:1"))
    shown = in_process("models")
    names = [line.split()[0] for line in shown.stdout.splitlines()[3:]]
    families = [name.rpartition("/")[2].partition("-")[0].lower() for name in names]
    assert families == sorted(families) and " no" not in shown.stdout
    assert "more do not fit" in shown.stderr
    everything = [line.split()[0] for line in in_process("models", "--all").stdout.splitlines()[3:]]
    assert everything[: len(names)] == names and len(everything) > len(names)
    one = in_process("models", "qwen3-coder-next").stdout
    assert one.splitlines()[1].startswith("Qwen/Qwen3-Coder-Next") and "  drafter z-lab/" in one
    assert "Did you mean" in in_process("models", "qwen3-7b").stderr
    assert "z-lab/Qwen3-8B-DFlash-b16" in in_process("models", "x/Qwen3-8B-4bit").stdout
    for name in ("tiny", "smollm2"):
        assert f"{name} comes with its drafter" in in_process("models", name).stderr


def test_models_says_what_is_downloaded(monkeypatch):
    copies = {"mlx-community/Qwen3-8B-4bit": 4_612_000_000, "z-lab/Qwen3-8B-DFlash-b16": 10**9}
    monkeypatch.setattr("dflash_mlx.loading.hub.Hub.copies", lambda _: copies)
    assert in_process("models").stdout.count(", downloaded 4.6 GB") == 1
    shown = in_process("models", "Qwen3-8B").stdout
    assert "downloaded: mlx-community/Qwen3-8B-4bit, 4.6 GB" in shown
    assert "downloaded: z-lab/Qwen3-8B-DFlash-b16, 1.0 GB" in shown
    listed = json.loads(in_process("models", "--json").stdout)["pairs"]
    [row] = [row for row in listed if row["downloaded"]]
    assert row["drafter_bytes"] == 10**9
    assert row["downloaded"] == {"mlx-community/Qwen3-8B-4bit": 4_612_000_000}


def test_inspecting_a_drafter(pair):
    folder = pair[3]
    shown = run("models", "--inspect", folder)
    assert shown.returncode == 0
    assert re.search(r"^block_size +16 +block_size *$", shown.stdout, re.MULTILINE)
    assert re.search(
        r"^head +the target's +no tensor lm_head.weight *$", shown.stdout, re.MULTILINE
    )
    printed = in_process("models", "--json", "--inspect", f"{folder}/config.json").stdout
    found = {decision["field"]: decision for decision in json.loads(printed)["decisions"]}
    assert found["target_layer_ids"]["value"] == [0, 2]
    assert found["target_layer_ids"]["source"].endswith("target_layer_ids")
    assert "DFlash2" in run("models", "--inspect", "tiny-dflash2").stdout
    elsewhere = run("models", "--inspect", "nobody/nothing")
    assert elsewhere.returncode == 1 and "dflash-mlx pull nobody/nothing" in elsewhere.stderr
    missing = run("models", "--inspect", "/no/such/folder")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1


def test_generate(pair, answer):
    done = start("generate", QUESTION, "-n", "24", "--compare", *pair)
    assert done.returncode == 0 and done.stdout == answer + "\n" * (not answer.endswith("\n"))
    assert "identical to plain decoding: yes" in done.stderr and " per step in " in done.stderr
    assert re.search(r"plain .* tok/s", done.stderr) and re.search(r"DFlash .*x", done.stderr)
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
    content = json.loads(start("generate", QUESTION, *options, *pair).stdout)
    assert (content["blas"], content["block_size"]) == ("stock", 5)


def broken(kind: str, folder: Path, pair: list[str]) -> list[str]:
    """Options and a prompt that cannot work."""
    target, drafter = pair[1], pair[3]
    if kind == "unknown model":
        return ["hi", "--model", "no/where", "--draft", drafter]
    if kind == "prompt too long":
        return ["x" * 9000, *pair]
    if kind == "drafter of another target":
        other = tinymodels.save_drafter(folder / "other", hidden_size=32, num_attention_heads=2)
        return ["hi", "--model", target, "--draft", str(other)]
    copy = shutil.copytree(target, folder / "copy")
    weights = copy / "model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        os.truncate(weights, weights.stat().st_size // 2)
    elif kind == "no config":
        (copy / "config.json").unlink()
    elif kind == "no chat template":
        (copy / "chat_template.jinja").unlink()
    return ["hi", "--model", str(copy), "--draft", drafter]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("unknown model", "no/where"),
        ("no weights", "model.safetensors"),
        ("truncated weights", "truncated"),
        ("no config", "config.json"),
        ("drafter of another target", "hidden_size"),
        ("prompt too long", "8191"),
        ("no chat template", "--no-chat-template"),
    ],
)
def test_errors_are_one_line(kind, message, pair, tmp_path):
    code = 2 if kind in ("prompt too long", "no chat template") else 1
    assert message in one_line_error(run("generate", *broken(kind, tmp_path, pair)), code)


def test_a_reader_that_leaves_early_is_no_error(pair):
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


# A program that says when it begins to import what it needs.
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
def test_ctrl_c(moment, pair, background_job):
    program = [*PROGRAM[:2], ANNOUNCED] if moment == "starting" else PROGRAM
    with popen([*program, "generate", QUESTION, "-n", "4000", "--no-policy", *pair]) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"" and process.wait(60) == 130
