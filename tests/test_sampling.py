"""Greedy choices, and settings that are refused instead of ignored."""

import mlx.core as mx
import pytest

from dflash_mlx.errors import DFlashError, SettingsError
from dflash_mlx.sampling import Sampler


def test_greedy_takes_the_largest_logit_and_the_first_of_equals():
    logits = mx.array([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0], [-3.0, -2.0, -1.0]])
    assert Sampler().choose(logits).tolist() == [1, 0, 2]
    assert Sampler(seed=7).choose(logits).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        # in range, and not supported by this version
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 40}, "top_k"),
        ({"min_p": 0.05}, "min_p"),
    ],
    ids=str,
)
def test_settings_are_never_ignored(settings, field):
    with pytest.raises(SettingsError, match=field) as caught:
        Sampler(**settings)
    assert isinstance(caught.value, DFlashError) and isinstance(caught.value, ValueError)
