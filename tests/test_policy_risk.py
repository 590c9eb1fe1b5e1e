"""What a round is worth: hope where a failure is cheap, caution where it is dear."""

from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy import WIDEST, costs

from dflash_mlx.policy.beliefs import LEVELS, Certainty, expected_tokens, level
from dflash_mlx.policy.risk import CAUTION, shortfall, speeds, worth
from dflash_mlx.policy.widths import Policy

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=15)


@given(RATES, st.floats(1, 20))
def test_a_shortfall_is_what_is_expected_of_the_square_of_the_loss(rates, cost):
    reaches = [1.0]
    for rate in rates:
        reaches.append(reaches[-1] * rate)
    brings = [here - beyond for here, beyond in pairwise([*reaches, 0.0])]  # 1, 2, ... tokens
    square = sum(chance * max(0, cost - n) ** 2 for n, chance in enumerate(brings, start=1))
    assert shortfall(rates, cost) == pytest.approx(square, abs=1e-9)


@given(RATES, RATES, st.floats(0, 2), st.floats(0.5, 2))
def test_hope_is_for_what_can_be_staked_and_caution_for_the_rest(rates, hopes, row, stake):
    slots = min(len(rates), len(hopes))
    rates, hopes = rates[:slots], hopes[:slots]
    prices = [1.0, *(1.2 + row * slot for slot in range(slots))]
    found = worth(rates, hopes, prices, stake)
    assert found[0] == 1 and len(found) == slots + 1
    for rows, cost in enumerate(prices[1:], start=2):
        if cost <= 1 + stake:
            assert found[rows - 1] == expected_tokens(hopes)[rows - 1]
        else:
            sober = expected_tokens(rates)[rows - 1]
            assert found[rows - 1] == sober - CAUTION * shortfall(rates[: rows - 1], cost)


def test_what_is_too_dear_has_no_speed_and_plain_decoding_always_has():
    assert speeds([1.0, 1.5, 2.0], [2.0, 2.5, 4.0], 3.0) == [0.5, 0.6, 0.0]
    assert speeds([1.0, 1.5], [2.0, 2.5], 0.0) == [0.5, 0.0]


def believing(pair, first, later):
    """A policy that has seen so many drafts, wherever the target was as sure as it is now."""
    policy = Policy(pair, WIDEST)
    beliefs = policy.beliefs()
    beliefs._tried[-1], beliefs._hit[-1] = 1e6, first * 1e6
    beliefs._reached[-1], beliefs._right[-1] = 1e6, later * 1e6
    return policy


@pytest.mark.parametrize("draft, drafts", [(0.1, True), (0.7, False)])
def test_a_gain_that_may_be_a_large_loss_is_not_worth_it(draft, drafts):
    """Every other draft is wrong. A failure costs little of a token here, and one and a half there.

    Both promise more than plain decoding does, and both can be paid for.
    """
    request = believing(costs(1.8, draft), 0.5, 0.7).start()
    request._account.book(0.0, 10)
    pays = max(speeds(request.expected_tokens(), request._seconds, 9.0))
    width = request.width(64, WIDEST)
    assert pays > 1.15 and (width > 1) == drafts


def test_an_opening_is_believed_to_be_known_until_more_of_it_is_seen():
    """A target hesitates how to begin. In the middle of a text that would say more."""
    certainty, levels = Certainty(), list[int]()
    for _ in range(12):
        certainty.take(1, log(0.5))
        levels.append(level(certainty.mean))
    assert levels == sorted(levels, reverse=True) and levels[0] == 1 and levels[3] == 0
    sure = Certainty()
    sure.take(1, log(0.9999))
    assert level(sure.mean) == len(LEVELS) - 1
