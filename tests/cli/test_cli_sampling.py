"""Sampling and the width policy on the command line."""

import json

import tinymodels
from program import run

from dflash_mlx.cli.options import note_without_effect
from dflash_mlx.loop import generate
from dflash_mlx.settings import SETTINGS

QUESTION = "what is 37 + 48?"
SAMPLED = ["-t", "1.0", "--top-p", "0.9", "--seed", "7"]


def test_a_seed_is_the_librarys_own_text(pair):
    messages = [{"role": "user", "content": QUESTION}]
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 16}
    expected = generate(tinymodels.target(), None, messages, **settings)
    content = json.loads(
        run("generate", QUESTION, "-n", "16", "--json", "--compare", *SAMPLED, *pair).stdout
    )
    assert (content["tokens"], content["seed"]) == (expected.tokens, 7)
    assert content["identical"] is True


def test_without_a_seed_one_is_drawn_and_told(pair):
    done = run(
        "generate", QUESTION, "-n", "4", "-t", "1.0", "--json", "--compare", "--verbose", *pair
    )
    content = json.loads(done.stdout)
    assert content["identical"] is True and f"seed: {content['seed']}" in done.stderr


def test_the_policy_can_be_switched_off_and_leaves_the_text_alone(pair):
    options = ["-n", "17", "--json", "--verbose", *pair]
    chosen = run("generate", QUESTION, *options)
    blocks = run("generate", QUESTION, *options, "--no-policy")
    pinned = run("generate", QUESTION, *options, "--block-size", "16")
    assert "a plain step takes" in chosen.stderr
    assert "a plain step takes" not in blocks.stderr + pinned.stderr
    chosen, blocks, pinned = (json.loads(done.stdout) for done in (chosen, blocks, pinned))
    assert chosen["steps"] == chosen["rounds"]
    assert chosen["tokens_per_step"] == chosen["tokens_per_round"]
    assert chosen["tokens"] == blocks["tokens"] == pinned["tokens"]
    assert blocks["widths"] == pinned["widths"] and "16" in blocks["widths"]


def test_what_has_no_effect_at_temperature_0_is_said(capsys):
    defaults = {name: one.default for name, one in SETTINGS.items()}
    for quiet in ({"temperature": 0.5, "seed": 7, "top_p": 0.9}, {}, {"repetition_penalty": 1.1}):
        note_without_effect(defaults | quiet)
        assert not capsys.readouterr().err
    note_without_effect(defaults | {"seed": 7, "top_p": 0.9})
    assert "--top-p, --seed has no effect" in capsys.readouterr().err


def test_only_where_no_model_was_named_is_the_toy_called_one():
    assert "tiny is a toy" in run("generate", "hi", "-n", "1").stderr
    assert "toy" not in run("generate", "hi", "-n", "1", "--model", "tiny").stderr


def test_draft_lengths_are_explained_by_the_run_alone():
    """Lookup keeps its own estimates, so the policy has none to show."""
    drafted = run("generate", QUESTION, "--verbose").stderr
    lookup = run("generate", QUESTION, "--verbose", "--draft", "lookup").stderr
    assert "\n8 rows: " in drafted and "\n8 rows: " not in lookup
