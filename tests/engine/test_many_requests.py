"""What a step of many requests launches, beside mlx-lm's own batching."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MOST = 1.5  # times what mlx-lm launches


@pytest.fixture(scope="module")
def many_requests():
    sys.path.insert(0, str(SCRIPTS))  # it imports another script
    try:
        spec = importlib.util.spec_from_file_location("many_requests", SCRIPTS / "many_requests.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("count", [8, 32])
def test_a_plain_step_launches_no_more_than_mlx_lm_s(many_requests, count):
    target = many_requests.random_target(num_hidden_layers=6)
    (theirs, _), (ours, _) = many_requests.counts_of(target, count, steps=2)
    assert 0 < ours <= MOST * theirs
