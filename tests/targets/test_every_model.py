"""A tiny model of every type in mlx-lm decodes to the tokens of mlx-lm's own loop."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from families import CharacterTokenizer, model_of, plain_tokens, random_prompt
from oracle import Oracle, separate_paths

import dflash_mlx as dm
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.targets import Target

MODELS = json.loads((Path(__file__).parents[1] / "data" / "mlx_lm_models.json").read_text())
NEEDS_METAL = {"bitnet"}  # because of mlx-lm's layers
TOKENS = 24


def rows_of_the_documented_table() -> dict[str, str]:
    """The row of the table in docs/targets.md that names a model type, by model type."""
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text()
    table, _, _ = page.partition("end of the table")
    rows = {}
    for row in table.splitlines():
        for name in re.findall(r"`(\S+)`", row):
            rows[name] = row
    return rows


ROWS = rows_of_the_documented_table()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NEEDS_METAL])
def test_every_model_of_mlx_lm_works_as_the_docs_say(name, make_docs):
    """It gives mlx-lm's tokens without a drafter, with prompt lookup and with an oracle.

    The table in docs/targets.md says how it drafts. Where it can draft trees, a row of a tree has
    the logits of its path read as a chain.
    """
    model = model_of(MODELS[name], 0, 0)
    target = Target(model, CharacterTokenizer(), MODELS[name], name)
    prompt = random_prompt(9, 1) * 3  # repeats itself, so that prompt lookup drafts
    answer = plain_tokens(model, prompt, TOKENS)
    for drafter in (None, LookupDrafter(), Oracle(prompt, answer, target.vocab_size, p=0.6)):
        size = None if drafter is None else 6
        result = dm.generate(target, drafter, prompt, max_tokens=TOKENS, block_size=size)
        assert result.tokens == answer
    assert result.stats.rounds < TOKENS - 1, "the oracle's drafts were not accepted"
    assert f"| {make_docs.drafting(target)} |" in ROWS[name], "run python scripts/make_docs.py"
    if target.supports_trees:
        session = target.start()
        tree = dm.Proposal([1, 2, 3, 4, 5, 6], (-1, 0, 0, 1, 2, 4))
        list(session.prefill(prompt))
        logits, _ = session.verify(tree)
        assert mx.allclose(logits, separate_paths(target, prompt, tree), atol=1e-4)
