"""MLA: one row gives mlx-lm's bits, and several rows give what single rows give."""

import mlx.core as mx
import pytest
from families import family_target, random_model, random_prompt
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.proposal import Proposal

MLA = ["kimi_k25", "deepseek_v3", "glm_moe_dsa", "deepseek_v32"]


def prefilled(target, prompt):
    session = target.start()
    list(session.prefill(prompt))
    return session


@pytest.mark.parametrize("family", MLA)
@pytest.mark.parametrize("length", [9, 60])  # below and above the 32 rows that an indexer picks
def test_one_row_has_the_logits_of_mlx_lm(family, length):
    """Fails when mlx-lm changes how it attends to latents: then targets/mla.py has to follow."""
    model = random_model(family)
    prompt = random_prompt(length, 2)
    mlx_lm_cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=mlx_lm_cache))
    session = prefilled(family_target(family), prompt)
    for token in (5, 6, 7):
        expected = model(mx.array([[token]]), cache=mlx_lm_cache)
        logits, _ = session.verify(Proposal([token]))
        session.commit([0])
        assert mx.array_equal(logits, expected[0])


@pytest.mark.parametrize("family", MLA)
@pytest.mark.parametrize("length", [9, 25, 60])
def test_16_rows_together_have_the_logits_of_single_rows(family, length):
    target = family_target(family)
    prompt = random_prompt(length, 2)
    rows = random_prompt(16, 3)
    together, _ = prefilled(target, prompt).verify(Proposal(rows))
    session = prefilled(target, prompt)
    steps = []
    for token in rows:
        logits, _ = session.verify(Proposal([token]))
        session.commit([0])
        steps.append(logits[0])
    assert mx.abs(together - mx.stack(steps)).max().item() < 2e-5
