"""The number of operations in a step of many requests, compared with mlx-lm's batching."""

import many_requests
import pytest

MOST = 1.5  # times the operations of mlx-lm


@pytest.mark.parametrize("count", [8, 32])
def test_a_plain_step_has_at_most_half_more_operations_than_mlx_lms(count):
    target = many_requests.random_target(num_hidden_layers=6)
    theirs, ours = many_requests.counts_of(target, count, steps=2)
    assert 0 < ours <= MOST * theirs
