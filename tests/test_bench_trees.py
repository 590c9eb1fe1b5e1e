"""`bench --trees`: what it counts is what was decoded, and its picture shows it."""

import json
from io import StringIO

import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget, TreeBigrams
from program import run
from rich.console import Console
from typer.testing import CliRunner

from dflash_mlx.bench.plots import caption, draw_trees
from dflash_mlx.bench.trees import tree_rows
from dflash_mlx.cli.app import app
from dflash_mlx.cli.bench_trees import _table
from dflash_mlx.errors import SettingsError
from dflash_mlx.loop import generate
from dflash_mlx.policy.trees import TreePolicy

TABLE = np.random.default_rng(3).normal(size=(24, 24)) * 2.5
TARGET, DRAFTER = BigramTarget(TABLE), TreeBigrams(TABLE)
PROMPTS = [("sums", [1, 2]), ("sums", [3, 4]), ("tales", [5])]
TOKENS, WAYS = 60, ["plain", "chain", "8", "32", "auto"]


@pytest.fixture(scope="module")
def rows():
    return {row.way: row for row in tree_rows(TARGET, DRAFTER, PROMPTS, [8, 32], TOKENS, 2)}


def length(policy, category: str | None = None, drafter=DRAFTER) -> float:
    """Tokens per round over the prompts, with a policy that knows nothing before the first."""
    tokens = rounds = 0
    for of, prompt in PROMPTS:
        stats = generate(TARGET, drafter, prompt, max_tokens=TOKENS, policy=policy).stats
        tokens += stats.round_tokens * (category in (None, of))
        rounds += stats.rounds * (category in (None, of))
    return tokens / rounds


def test_every_way_has_its_row(rows):
    assert list(rows) == WAYS
    for row in rows.values():
        assert row.identical == row.runs == 2 * len(PROMPTS)
        assert list(row.tokens_per_round) == ["sums", "tales", "all"]
    assert set(rows["plain"].tokens_per_round.values()) == {1.0}


def test_lengths_are_those_of_the_runs(rows):
    chain, tree = rows["chain"].tokens_per_round, rows["32"].tokens_per_round
    assert chain["all"] == pytest.approx(length(None))
    assert chain["tales"] == pytest.approx(length(None, "tales"))
    assert tree["sums"] == pytest.approx(length(TreePolicy.fixed(32), "sums"))
    assert tree["all"] > chain["all"]


def test_speeds_are_paired(rows):
    assert rows["plain"].over_plain == 1.0 == rows["auto"].auto_over
    assert all(row.tokens_per_second > 0 for row in rows.values())


def test_trees_that_know_the_noise_are_longer(rows):
    for way in ("8", "32"):
        assert rows[way].with_noise > rows[way].without_noise > 1
    assert rows["chain"].with_noise is None


def test_a_drafter_without_trees_is_refused():
    with pytest.raises(SettingsError, match="drafts trees"):
        tree_rows(TARGET, BigramDrafter(TABLE), PROMPTS[:1], [8], 10, 1)


def test_the_picture_is_one():
    row = {"tokens_per_round": {"sums": 2.0, "all": 2.5}, "tokens_per_second": 10.0}
    row |= {"low": 8.0, "high": 11.0}
    content = {"model": "bigrams", "machine": {}, "tree_budget": [row | {"way": w} for w in WAYS]}
    assert draw_trees(content).startswith(b"\x89PNG")
    told = caption(content | {"block_size": 16, "prompts": 42, "repeats": 3})
    assert told.startswith("bigrams · block size 16 · 42 prompts x 3 runs")


def test_the_command(tmp_path, pair):
    picture, prompts = tmp_path / "trees.png", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 47 + 38?"}')
    done = run(
        *("bench", "--trees", "8,16", "--prompts", prompts, "--max-tokens", "16"),
        *("--repeats", "1", "--plot", picture, "--json", *pair),
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert [row["way"] for row in content["tree_budget"]] == ["plain", "chain", "8", "16", "auto"]
    assert all(row["identical"] == row["runs"] for row in content["tree_budget"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bench", "--trees", "1"], "numbers from 2 on"),
        (["bench", "--trees", "many"], "numbers from 2 on"),
        (["bench", "--plot", "x.png"], "goes with"),
        (["bench", "--trees", "8", "--plot", "no/such/x.png"], "no folder"),
        (["bench", "--trees", "8", "--plot", "x.svg"], "name it x.png"),
        (["bench", "--trees", "8", "--plot", "x"], "name it x.png"),
        (["generate", "hi", "--tree-budget", "1"], "neither a number"),
        (["generate", "hi", "--tree-budget", "on"], "neither a number"),
        (["generate", "hi", "--tree-budget", "8", "--no-draft"], "goes without"),
        (["chat", "--tree-budget", "auto", "--block-size", "8"], "goes without"),
        (["bench", "--tree-budget", "8", "--draft", "lookup"], "goes without --draft lookup"),
        (["bench", "--trees", "8", "--draft", "lookup"], "goes without --draft lookup"),
        (["generate", "hi", "--draft", "lookup", "--tree-budget", "8"], "--draft lookup"),
        (["bench", "--data", "."], "goes with --suite"),
        (["bench", "--data", ".", "--suite", "embedded"], "goes with --suite"),
        (["bench", "--draft", "none"], "name what drafts"),
        (["tune", "--draft", "none"], "name what drafts"),
        (["generate", "hi", "--draft", "none", "--block-size", "4"], "goes without --block-size"),
        (["generate", "hi", "--no-draft", "--draft-bits", "4"], "goes without --draft-bits"),
        (["generate", "hi", "--draft", "none", "--no-policy"], "goes without --no-policy"),
        (["chat", "--no-draft", "--no-policy"], "goes without --no-policy"),
        (["generate", "hi", "--draft", "none", "--compare"], "goes without --compare"),
        (["generate", "hi", "--no-draft", "--compare"], "goes without --compare"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_one_line(options, message):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, options)
    assert done.exit_code == 2 and message in done.stderr


def test_the_table_fits_a_terminal(rows):
    console = Console(width=80, record=True, file=StringIO())
    console.print(_table(list(rows.values())))
    text = console.export_text()
    assert "…" not in text and all(name in text for name in ("sums", "tales", "all", *WAYS))
