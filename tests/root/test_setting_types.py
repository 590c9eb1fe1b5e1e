"""Settings of a wrong type are errors of ours, in words."""

import pytest
import tinymodels

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.settings import SETTINGS


@pytest.fixture(scope="module")
def target():
    return tinymodels.target()


NUMBERS = [name for name, one in SETTINGS.items() if one.kind in (int, float)]
WRONG = [
    {"chat_template_kwargs": "x"},
    {"chat_template_kwargs": [1]},
    {"stop_applies": 5, "stop": ["a"]},
    {"max_tokens": True},
    {"stop": b"x"},
    {"policy": 3},
    {"think": "yes"},
    {"reasoning_effort": "much"},
    {"salt": b"me"},
    {"branches": "ab"},
    *({name: value} for name in NUMBERS for value in ("1", True, float("nan"), [1])),
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_a_wrong_type_is_named(target, settings):
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(SettingsError, match=next(iter(settings))):
        dm.generate(target, None, chat, **{"max_tokens": 1, **settings})
