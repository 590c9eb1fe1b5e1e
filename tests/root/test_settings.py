"""Settings out of range, or of a wrong type, are refused at once: in one line, by their names."""

import math
import re
from functools import partial

import numpy as np
import pytest
from tinymodels import random_drafter, target, tokenizer

import dflash_mlx as dm
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.errors import DFlashError, SettingsError
from dflash_mlx.settings import SETTINGS

SIZE = len(tokenizer())
NUMBERS = [name for name, setting in SETTINGS.items() if setting.kind in (int, float)]
WRONG = {
    "chat_template_kwargs": ["x", [1]],
    "stop_applies": [5],
    "stop": [b"x", [""], ["a", 5], 5],
    "policy": [3, "tiny", "automatic", object(), dm.DraftPolicy],
    "conversation": [3, "tiny", dm.Conversation],
    "prefix": [8],
    "think": ["yes"],
    "continues": [1],
    "reasoning_effort": ["much"],
    "salt": [b"me"],
    "branches": ["ab"],
    "max_tokens": [-1, 2.5],
    "temperature": [-0.1, 10**400],
    "top_p": [0.0],
    "top_k": [-1, 2.5, SIZE + 1],
    "min_p": [-0.1],
    "seed": [2**32],
    "repetition_penalty": [0.0, 1.1e20],
    "repetition_context_size": [0, 64],
    "frequency_context_size": [64],  # it counts the whole answer
    "logit_bias": [{SIZE: 1.0}, {"a": 1.0}, {1: math.inf}, {True: 1.0}],
    "logits_processors": ["json"],
    "block_size": [0, 17, 10**400],
    "tree_budget": [1, -1, 8.0, "many", 1025, 10**30],
    "kv_bits": [0, 2, 16, "8", 4.0, [], np.array([8, 4])],
    "xtc_probability": [0.1],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]
CASES += [(name, value) for name in NUMBERS for value in ("1", True, math.nan, [1])]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_the_error_about_a_wrong_value_names_the_setting(name, value):
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(SettingsError, match=name) as caught:
        dm.stream_generate(target(), random_drafter(), chat, **{name: value})
    assert isinstance(caught.value, DFlashError) and isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(dm.Conversation, "tiny", None), "target"),
        (partial(dm.Conversation, target(), LookupDrafter), "drafter"),  # its class
        (partial(dm.Conversation, target(), None, prefix="folder"), "prefix"),
        (partial(dm.Conversation, target(), None, kv_bits=3), "kv_bits|must be 8 or 4"),
        (partial(dm.Conversation, target(), None, salt=b"me"), "salt"),
        (partial(dm.stream_generate, target(), "tiny", [1]), "drafter"),
        (partial(dm.stream_generate, target(), LookupDrafter, [1]), "drafter"),
        (partial(dm.Engine, target(), None, stall_ms=-1), "stall_ms"),
        (partial(dm.Engine, target(), None, most_jobs=-1), "most_jobs"),
        (partial(dm.Engine, target(), None, memory=-1), "memory"),
        (partial(dm.Engine, target(), None, policy=-1), "policy"),
        (partial(dm.Engine, target(), None, prefix=5), "prefix"),
        (partial(dm.Engine, target(), -1), "drafter"),
        (partial(dm.DraftPolicy.of, target(), None), "policy needs a drafter"),
        (partial(dm.DraftPolicy.of, target(), "lookup"), "policy needs a drafter"),
        (partial(dm.DraftPolicy.of, "tiny", random_drafter()), "target"),
        *(
            (partial(dm.DraftPolicy.of, target(), random_drafter(), block_size=size), "block_size")
            for size in (0, -1, None, 1.5, True, "8", 1025, 10**400)
        ),
    ],
)
def test_the_error_about_a_wrong_argument_names_it(make, name):
    """Arguments of objects that several requests share, and of the functions that take them."""
    with pytest.raises(SettingsError, match=name):
        make()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_token", "Did you mean max_tokens?"),
        ("repetition_penalti", "Did you mean repetition_penalty?"),
        ("sampler", "help(dflash_mlx.generate)"),
    ],
)
def test_the_error_about_an_unknown_setting_suggests_the_right_one(name, advice):
    """An engine raises it in the caller's thread, like every other error in a request."""
    message = f"no setting {name!r}.*{re.escape(advice)}"
    with dm.Engine(target(), None) as engine:
        for call in (partial(dm.generate, target(), None), engine.submit):
            with pytest.raises(SettingsError, match=message):
                call([1, 2], **{name: 3})
        with pytest.raises(DFlashError, match="vocabulary"):
            engine.submit([10**6])
