"""What a step of many requests launches, compared with mlx-lm's own batching."""

import many_requests
import pytest

MOST = 1.5  # times what mlx-lm launches


@pytest.mark.parametrize("count", [8, 32])
def test_a_plain_step_launches_no_more_than_mlx_lm_s(count):
    target = many_requests.random_target(num_hidden_layers=6)
    theirs, ours = many_requests.counts_of(target, count, steps=2)
    assert 0 < ours <= MOST * theirs
