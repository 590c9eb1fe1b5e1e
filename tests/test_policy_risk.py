"""What a round is worth: hope where a failure is cheap, caution where it is dear."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_policy import WIDEST, believing, costs

from dflash_mlx.policy.account import ALLOWANCE
from dflash_mlx.policy.beliefs import LEVELS, Certainty, expected_tokens, level
from dflash_mlx.policy.risk import CAUTION, fastest, shortfall, speeds, worth
from dflash_mlx.policy.widths import TRIAL_GAIN, Policy

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=15)


@given(RATES, st.floats(1, 20))
def test_a_shortfall_is_what_is_expected_of_the_square_of_the_loss(rates, cost):
    reaches = [1.0]
    for rate in rates:
        reaches.append(reaches[-1] * rate)
    brings = [here - beyond for here, beyond in pairwise([*reaches, 0.0])]  # 1, 2, ... tokens
    square = sum(chance * max(0, cost - n) ** 2 for n, chance in enumerate(brings, start=1))
    assert shortfall(rates, cost) == pytest.approx(square, abs=1e-9)


@given(RATES, RATES, st.floats(0, 2), st.floats(0.5, 2), st.sets(st.integers(2, 16)))
@example([0.9] * 4, [0.9] * 4, 2.0, 0.5, set())  # dearer than it may bring
def test_hope_is_for_what_can_be_staked_and_caution_for_the_rest(rates, hopes, row, stake, but):
    slots = min(len(rates), len(hopes))
    rates, hopes = rates[:slots], hopes[:slots]
    prices = [1.0, *(1.2 + row * slot for slot in range(slots))]
    widths = [1, *(width for width in range(2, slots + 2) if width not in but)]
    found = worth(widths, [prices[rows - 1] for rows in widths], rates, hopes, stake)
    assert found[0] == 1 and len(found) == len(widths)
    for rows, tokens in zip(widths[1:], found[1:], strict=True):
        cost = prices[rows - 1]
        if cost <= 1 + stake:
            assert tokens == expected_tokens(hopes)[rows - 1]
        else:
            sober = expected_tokens(rates)[rows - 1]
            assert tokens == pytest.approx(sober - CAUTION * shortfall(rates[: rows - 1], cost))


def test_what_is_too_dear_has_no_speed_and_plain_decoding_always_has():
    assert speeds([1.0, 1.5, 2.0], [2.0, 2.5, 4.0], 3.0) == [0.5, 0.6, 0.0]
    assert speeds([1.0, 1.5], [2.0, 2.5], 0.0) == [0.5, 0.0]


def test_the_fastest_round_is_a_plain_one_unless_another_is_clearly_faster():
    assert fastest([1.0, 2.1, 2.2], [1.0, 2.0, 2.0], 9.0, 1.02) == (2, 1.1)
    assert fastest([1.0, 2.02], [1.0, 2.0], 9.0, 1.02) == (0, 1.0)
    assert fastest([1.0, 2.2], [1.0, 2.0], 1.9, 1.02) == (0, 1.0), "what cannot be paid for"


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


def test_a_risk_is_counted_in_plain_tokens_as_they_are_begun_ahead():
    """A round of which they take three quarters loses more of them than a clock of its own says."""
    widths = []
    for ahead in (1.0, 0.75):
        request = believing(replace(costs(1.8, 0.5), ahead=ahead), 0.5, 0.8).start()
        request._account.book(0.0, 10)
        speed = max(speeds(request.expected_tokens(), request._seconds, 9.0))
        assert speed * ahead > 1.02  # as much as drafting has to promise
        widths.append(request.width(64, WIDEST))
    assert widths[0] > 4 and widths[1] == 1


def test_no_width_is_tried_in_hope_for_what_it_costs():
    """Plain rounds are known, others are not; and drafts that were tried here were all wrong."""
    policy = Policy(costs(1.8, 0.7), WIDEST)
    for _ in range(9):
        policy.watch.saw(1, 1.0, 1.0)
    request, beliefs = policy.start(), policy.beliefs()
    request._account.book(0.0, 10)
    assert request.width(64, WIDEST, 0.4) > 1
    beliefs._tried[0] = 4.0
    assert expected_tokens([beliefs.hope(0), *beliefs.rates(0)[1:]])[3] > TRIAL_GAIN
    assert request.width(64, WIDEST, 0.4) == 1


@pytest.mark.parametrize("draft, tried", [(1.0, True), (1.3, False)])
def test_what_an_answer_can_stake_has_an_end(draft, tried):
    """However long it is: 1.25 plain tokens, though more is hoped for than is believed."""
    pair = costs(1.2, draft)
    request = believing(pair, 0.05, 0.9).start()
    request._policy.beliefs().hope = lambda at: 0.9
    for _ in range(400):
        request.observe(0, 0)
    assert (request.width(64, WIDEST) > 1) == tried


@pytest.mark.parametrize("owed, tried", [(0.0, True), (0.1, False)])
def test_what_is_owed_cannot_be_staked_again(owed, tried):
    """Not even where the account would pay for it, by what is believed of the drafts."""
    request = believing(costs(1.2, 0.44), 0.45, 0.3).start()
    request._policy.beliefs().hope = lambda at: 0.9
    request._account.book((1 + ALLOWANCE) * 10 + owed, 10)
    assert request._affordable(request.rates()) > request._seconds[1]
    assert (request.width(64, WIDEST) > 1) == tried


def test_near_the_end_nothing_is_staked():
    """What a try would teach comes too late: caution counts for cheap rounds, too."""
    request = believing(costs(1.8, 0.3), 0.35, 0.5).start()
    request._account.book(0.0, 10)
    assert request.width(64, WIDEST) > 1
    assert request.width(64, WIDEST - 1) == 1


def test_an_opening_is_believed_to_be_known_until_more_of_it_is_seen():
    """A target hesitates how to begin. In the middle of a text that would say more."""
    certainty, levels = Certainty(), list[int]()
    for _ in range(12):
        certainty.take(1, 0.5)
        levels.append(level(certainty.mean))
    assert levels == sorted(levels, reverse=True) and levels[0] == 1 and levels[3] == 0
    sure = Certainty()
    sure.take(1, 0.9999)
    assert level(sure.mean) == len(LEVELS) - 1
