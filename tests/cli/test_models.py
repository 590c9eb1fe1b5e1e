"""`models`: a list for every Mac, with the same meaning of GB, in which no model is missing."""

import json
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pexpect
import pytest
from program import run
from terminal import Terminal

from dflash_mlx.cli import models
from dflash_mlx.errors import DownloadError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import pairs
from dflash_mlx.loading.sizes import find_size
from dflash_mlx.machine.facts import working_set

README = Path(__file__).parents[2] / "README.md"
GIB = 2**30
SUM = re.compile(r"^(\S+)(?: \*)? +([\d.]+) \+ ([\d.]+) \+ ([\d.]+) = +([\d.]+)(.*)$")


def listed(text):
    """The rows of a list: name -> (GB of weights, drafter, context, total; rest of the row)."""
    rows = {}
    for line in text.splitlines():
        match = SUM.match(line)
        if match:
            name, *sizes, rest = match.groups()
            rows[name] = (*map(float, sizes), rest)
    return rows


@pytest.mark.parametrize("memory", [8, 16, 24, 64, 192, 512])
@pytest.mark.parametrize("chip", [[], ["--chip", "M4"]])
def test_every_model_has_a_row_or_is_mentioned(memory, chip):
    """Rows are sorted by size, and each of them fits."""
    done = run("models", "--memory", memory, *chip)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    for pair in pairs():
        assert re.search(rf"(^|[ ]){re.escape(pair.short)}\b", text, re.M), pair.short
    rows = listed(done.stdout)
    assert rows and len(done.stdout.splitlines()) <= models.MAX_ROWS + 3
    limit = working_set(memory * GIB) / 1e9
    for name, (weights, drafter, context, total, _) in rows.items():
        assert total <= limit + 0.05, name
        assert weights + drafter + context == pytest.approx(total, abs=0.16)
    totals = [row[3] for row in rows.values()]
    assert totals == sorted(totals, reverse=True)


def test_gb_mean_the_same_in_every_list():
    plain = listed(run("models", "--memory", "48", "--all").stdout)
    with_chip = listed(run("models", "--memory", "48", "--chip", "M4 Pro", "--all").stdout)
    assert plain.keys() == with_chip.keys() and len(plain) > 25
    assert all(plain[name][:4] == with_chip[name][:4] for name in plain)
    content = json.loads(run("models", "--memory", "48", "--json").stdout)
    needs = {row["targets"][0].rpartition("/")[2]: row["memory"]["4"] for row in content["pairs"]}
    for name, row in plain.items():
        parts = [needs[name][part] / 1e9 for part in ("weights", "drafter", "context", "total")]
        assert parts == pytest.approx(row[:4], abs=0.051)
    details = run("models", "Qwen3-4B", "--memory", "48").stdout
    weights, drafter, context, total, _ = plain["Qwen3-4B"]
    assert f"4 bits             {weights} + {drafter} + {context} =  {total}  fits" in details


def test_all_includes_models_that_do_not_fit():
    done = run("models", "--memory", "16", "--all")
    large = re.search(r"^Qwen3-32B .* too large$", done.stdout, re.M)
    small = re.search(r"^Qwen3-4B .* fits$", done.stdout, re.M)
    assert large and small and "Too large" not in done.stderr
    none = run("models", "--memory", "1")
    assert "None of them fits" in none.stdout and "Qwen3.5-0.8B" in none.stderr


def test_a_chip_adds_predicted_speeds():
    done = run("models", "--memory", "16", "--chip", "m4")
    rows = listed(done.stdout)
    assert re.search(r"GB +plain speed  drafting pays above$", done.stdout, re.M)
    assert "predictions, not measurements" in done.stderr
    assert "--chip" not in done.stderr
    for *_, rest in rows.values():
        assert re.fullmatch(r" *\d+ tok/s +\d\.\d tokens/step", rest)
    faster = listed(run("models", "--memory", "16", "--chip", "M4 Max").stdout)
    speed = {name: int(row[4].split()[0]) for name, row in rows.items()}
    assert all(int(faster[name][4].split()[0]) > speed[name] for name in speed)
    content = json.loads(run("models", "--memory", "16", "--chip", "M4", "--json").stdout)
    assert content["chip"] == "M4" and content["prediction"] is True
    [qwen] = [row for row in content["pairs"] if row["targets"] == ["Qwen/Qwen3-8B"]]
    assert round(qwen["plain"]) == speed["Qwen3-8B"] and qwen["fits"] is True


def test_this_machine_is_the_default(monkeypatch):
    """The list is for its chip, if that is known, and the memory that models may use."""
    monkeypatch.setattr(models, "usable_bytes", lambda: working_set(16 * GIB))
    monkeypatch.setattr(models, "_device", lambda: "AMD EPYC")
    unknown = run("models")
    assert "Room on this machine: 11.5 GB" in unknown.stderr and "tok/s" not in unknown.stdout
    monkeypatch.setattr(models, "_device", lambda: "Apple M4")
    default = run("models")
    assert default.stdout == run("models", "--chip", "M4", "--memory", "16").stdout
    other = run("models", "--memory", "16")  # another Mac, whose chip is not given
    assert other.stdout == unknown.stdout and "Room on a Mac with 16 GB" in other.stderr


def test_a_name_shows_the_default_drafter_first_and_a_command_to_try():
    shown = run("models", "mlx-community/Qwen3-8B-4bit", "--chip", "M4", "--memory", "16").stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0].startswith("Qwen/Qwen3-8B: GB of weights + drafter + 16,000 tokens")
    [first] = [line for line in lines if line.startswith("drafter (default)")]
    assert "z-lab/Qwen3-8B-DFlash-b16" in first
    assert first.endswith("(trained without reasoning: use --no-think)")
    others = [place for place, line in enumerate(lines) if line.startswith("other drafters")]
    assert lines.index(first) + 1 == others[0]
    speed = "22 tok/s without drafting (predicted); drafting pays above 2.2 tokens per step"
    assert speed in shown
    tried = "dflash-mlx chat --model mlx-community/Qwen3-8B-4bit --no-think"
    assert lines[-1].split(maxsplit=1) == ["try", tried]
    many = run("models", "27b", "--memory", "24")
    assert {"Qwen3.8-27B", "Ternary-Bonsai-27B"} <= listed(many.stdout).keys()


def test_readme_shows_what_fits_16_24_and_64_gigabytes():
    blocks = re.findall(
        r"^    \$ dflash-mlx (models .*)\n((?:    .*\n)+)", README.read_text(), re.M
    )
    assert [shlex.split(command)[2] for command, _ in blocks] == ["16", "24", "64"]
    for command, output in blocks:
        assert run(*shlex.split(command)).stdout == re.sub("^    ", "", output, flags=re.M)


def test_a_name_that_is_not_in_the_list_gets_advice():
    done = run("models", "mistral")
    assert done.returncode == 1 and "MTP head" in done.stderr
    assert "Did you mean" in run("models", "qwen3-7b").stderr
    for name in ("tiny", "smollm2"):
        assert f"{name} comes with its drafter" in run("models", name).stderr


def is_quantized_on_load(pair):
    """Whether the model is published in 16 bits only: no quantized version of it is known."""
    size = find_size(pair)
    return pair.conversion is None and size is not None and size.stored is None


QUANTIZED_ON_LOAD = [pair.short for pair in pairs() if is_quantized_on_load(pair)]


@pytest.mark.parametrize("name", QUANTIZED_ON_LOAD)
def test_a_model_without_a_4_bit_conversion_is_tried_with_target_bits_4(name, monkeypatch):
    """Its original is downloaded, and --target-bits 4 quantizes it. Its size is that of 4 bits."""
    monkeypatch.setattr(Hub, "remote_bytes", Mock(side_effect=DownloadError("no answer")))
    [pair] = [pair for pair in pairs() if pair.short == name]
    original = pair.targets[0]
    size = find_size(pair)
    billions_of_parameters = size.dense + size.lookup + size.experts * size.expert
    published_gb = 2 * billions_of_parameters
    shown = run("models", original).stdout
    assert re.search(rf"^  try .*--model {original} --target-bits 4$", shown, re.M)
    about = f"{original}, about {published_gb:.1f} GB (16 bits, quantized on load)"
    assert re.search(rf"^  download +{re.escape(about)}$", shown, re.M)
    content = json.loads(run("models", original, "--json").stdout)
    assert content["pairs"][0]["target_bits"] == 4


def test_the_size_of_a_download_without_a_conversion_is_that_on_the_hub(monkeypatch):
    monkeypatch.setattr(Hub, "remote_bytes", lambda self, name: 19_300_000_000)
    shown = run("models", "Qwen3.5-9B").stdout
    assert "dflash-mlx chat --model Qwen/Qwen3.5-9B --target-bits 4\n" in shown
    assert "Qwen/Qwen3.5-9B, 19.3 GB (16 bits, quantized on load)\n" in shown


@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "gpt-oss-120b", "MiniCPM5-2B"])
def test_models_of_4_bits_or_of_unknown_size_are_tried_as_published(name, monkeypatch):
    monkeypatch.setattr(Hub, "remote_bytes", Mock(side_effect=DownloadError("no answer")))
    shown = run("models", name).stdout
    assert "--target-bits" not in shown and "quantized on load" not in shown
    assert json.loads(run("models", name, "--json").stdout)["pairs"][0]["target_bits"] is None


def test_the_list_marks_what_is_quantized_on_load():
    meaning = "* no 4-bit conversion is known: "
    done = run("models", "--all", "--memory", "64")
    marked = re.findall(r"^(\S+) \* ", done.stdout, re.M)
    assert sorted(marked) == sorted(QUANTIZED_ON_LOAD)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(meaning) and "--target-bits 4" in last and len(last) <= 80
    assert meaning not in run("models", "Qwen3-Coder-30B", "--json").stdout
    assert meaning not in run("models", "gpt-oss").stdout, "no row is marked"


def test_the_list_says_how_to_get_from_a_short_name_to_the_full_one():
    done = run("models", "--memory", "64", "--chip", "M4")
    full = "Names are short: 'dflash-mlx models NAME' shows the full name to type."
    assert done.stderr.splitlines()[-1] == full
    shown = run("models", "Qwen3-Coder-Next").stdout
    assert "--model Qwen/Qwen3-Coder-Next" in shown


@pytest.mark.parametrize("name", [[], ["Qwen3-8B"]])
def test_without_a_chip_there_are_no_speeds_but_a_hint(name):
    done = run("models", *name, "--memory", "16")
    assert "tok/s" not in done.stdout
    assert done.stderr.splitlines()[-1] == "Add --chip M4 for predicted speeds."
    assert "--chip" not in run("models", *name, "--memory", "16", "--chip", "M4").stderr
    assert not run("models", *name, "--memory", "16", "--json").stderr


def test_an_unknown_size_is_one_line():
    shown = run("models", "GLM-5.2", "--memory", "512").stdout
    [line] = [line for line in shown.splitlines() if "size not known" in line]
    assert line.split(maxsplit=1) == ["memory", "size not known"]
    assert " bits" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100])
def test_the_list_fits_a_terminal(columns, tmp_path):
    arguments = ("--memory", "16", "--chip", "M4")
    terminal = Terminal(tmp_path, columns, *arguments, command="models")
    terminal.program.expect(pexpect.EOF)
    lines = [line for line in terminal.lines if line]
    assert len(lines) < 24 and max(map(len, lines)) <= columns
    assert len(listed("\n".join(lines))) == models.MAX_ROWS, "a row is wrapped"
