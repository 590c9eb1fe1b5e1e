"""MLA rows take one path, whatever their number: for one row it is mlx-lm's own, bit for bit."""

from threading import Lock

import mlx.core as mx
import pytest
from families import random_model, random_prompt
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.targets.mla import use_absorbed_mla
from dflash_mlx.targets.overrides import Overrides

MLA = ["kimi_k25", "deepseek_v3", "glm_moe_dsa", "deepseek_v32"]


def prefilled(model, prompt):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=cache))
    return cache


def layers(model):
    return getattr(model, "language_model", model).model.layers


@pytest.mark.parametrize("family", MLA)
@pytest.mark.parametrize("length", [9, 60])  # an indexer picks 32 rows: all of them, then some
def test_one_row_is_mlx_lms_own(family, length):
    """Fails when mlx-lm changes how it attends to latents: then targets/mla.py has to follow."""
    model, prompt = random_model(family), random_prompt(length, 2)
    overrides = Overrides(Lock())
    use_absorbed_mla(layers(model), overrides)
    theirs, ours = prefilled(model, prompt), prefilled(model, prompt)
    for token in (5, 6, 7):
        expected = model(mx.array([[token]]), cache=theirs)
        with overrides.installed():
            assert mx.array_equal(model(mx.array([[token]]), cache=ours), expected)


@pytest.mark.parametrize("family", MLA)
@pytest.mark.parametrize("length", [9, 25, 60])
def test_many_rows_are_as_many_single_ones(family, length):
    model, prompt, rows = random_model(family), random_prompt(length, 2), random_prompt(16, 3)
    overrides = Overrides(Lock())
    use_absorbed_mla(layers(model), overrides)
    together, alone = prefilled(model, prompt), prefilled(model, prompt)
    with overrides.installed():
        at_once = model(mx.array([rows]), cache=together)[0]
        steps = [model(mx.array([[token]]), cache=alone)[0, 0] for token in rows]
    assert mx.abs(at_once - mx.stack(steps)).max().item() < 2e-5
