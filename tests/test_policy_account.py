"""The account of a request: what a round is expected to lose, and what it can lose at most."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import WIDEST, believing, costs

from dflash_mlx.policy.account import (
    ALLOWANCE,
    CREDIT,
    FADING,
    FIRST,
    LITTLE,
    RELIEF,
    RISK,
    SHARE,
    STAKE,
    SURE_FIRST,
    Account,
)
from dflash_mlx.policy.widths import Policy

RATES = st.lists(st.floats(0, 0.999), min_size=1, max_size=15)
# Half of them lose little, so that debts of all sizes come together.
ROUNDS = st.lists(
    st.one_of(
        st.tuples(st.floats(1, 8), st.integers(1, 16)),
        st.tuples(st.floats(1, 3), st.integers(1, 2)),
    ),
    max_size=40,
)


def expected_loss(cost, rates):
    """By definition: over what the round may bring, how much dearer it is than plain decoding."""
    loss, path = 0.0, 1.0
    for brought, rate in enumerate(rates, start=1):
        loss += path * (1 - rate) * max(0.0, cost - brought)
        path *= rate
    return loss + path * max(0.0, cost - len(rates) - 1)


@settings(max_examples=150)
@given(RATES, ROUNDS, st.booleans())
def test_the_dearest_round_is_expected_to_lose_what_there_is(rates, rounds, surest):
    account, tokens, ahead, felt = Account(), 0, 0.0, 0.0
    for cost, brought in rounds:
        account.book(cost, brought)
        gain = (1 + ALLOWANCE) * brought - cost
        tokens, ahead = tokens + brought, min(10.0, ahead + gain)
        relief = RELIEF * brought if -ahead < RISK + LITTLE * tokens else 0.0
        faded = min(0.0, min(felt, 0.0) * FADING**brought + relief)
        felt = min(10.0, faded + max(felt, 0.0) + gain)
    first = SURE_FIRST if surest else FIRST
    risk = min(RISK, first + SHARE * (tokens + 1)) + felt
    cost = account.affordable(rates, surest)
    assert 1 <= cost <= max(1, 1 + CREDIT + ahead)
    stake = max(RISK, min(STAKE, SHARE * (tokens + 1) + min(0.0, ahead)))
    assert account.stake == stake + min(0.0, felt)
    assert cost >= max(1, min(1 + stake + felt, 1 + CREDIT + ahead)) - 1e-9
    if cost > 1 + stake + felt and cost <= len(rates):  # further out the last rate goes on
        assert expected_loss(cost, rates) <= max(0, risk) + 1e-9
        if 1 < cost < 1 + CREDIT + ahead:
            assert expected_loss(cost, rates) == pytest.approx(risk)


@given(RATES, st.integers(0, 14), st.floats(0, 0.999))
def test_surer_drafts_may_be_dearer(rates, place, rate):
    surer = [max(one, rate) if at == place else one for at, one in enumerate(rates)]
    assert Account().affordable(surer) >= Account().affordable(rates) - 1e-9


def spent_on_nothing(pair, tokens, certainty):
    """What an answer costs of which every draft is wrong, in plain tokens, and its rounds."""
    request, seconds, widths = Policy(pair, WIDEST).start(), pair.rounds(64, WIDEST), []
    for made in range(tokens):
        widths.append(request.width(64, min(WIDEST, tokens - made), certainty))
        request.observe(widths[-1] - 1, 0)
    return sum(seconds[width - 1] for width in widths), widths


@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 20, 40, 100, 300])
@pytest.mark.parametrize("last_row, draft", [(1.2, 0.1), (1.8, 0.4), (1.8, 0.75), (4.6, 0.3)])
def test_where_the_target_is_unsure_little_is_lost_at_any_length(last_row, draft, tokens):
    """A twentieth where every draft is wrong, however long the answer."""
    for certainty in (0.4, 0.7):
        spent, _ = spent_on_nothing(costs(last_row, draft), tokens, certainty)
        assert spent <= tokens / 0.95 + FIRST


@pytest.mark.parametrize("last_row, draft", [(1.2, 0.1), (1.8, 0.4), (1.8, 0.75), (4.6, 0.3)])
def test_where_it_is_sure_one_wrong_guess_comes_on_top(last_row, draft):
    """A drafter that is wrong although the target has no doubt: one block, and a twentieth.

    Or two blocks, where they cost next to nothing.
    """
    pair = costs(last_row, draft)
    for tokens in (3, 8, 20, 40, 100, 300):
        spent, widths = spent_on_nothing(pair, tokens, 0.9999)
        dearest = max(pair.rounds(64, WIDEST)[width - 1] for width in widths)
        assert spent <= tokens / 0.95 + FIRST + max(RISK, dearest - 1)


def test_the_first_block_is_whole_where_the_target_is_sure_and_rows_are_cheap():
    widths = {
        (last_row, certainty): Policy(costs(last_row, 0.6), WIDEST).start().width(64, 16, certainty)
        for last_row in (1.8, 8.0)
        for certainty in (0.9999, 0.7)
    }
    assert widths[1.8, 0.9999] == WIDEST
    assert widths[1.8, 0.7] == widths[8.0, 0.7] == 1
    # Where a wrong wide block is dear, the first one is narrower.
    assert 1 <= widths[8.0, 0.9999] < WIDEST


def test_a_block_is_no_narrower_where_nine_of_ten_first_slots_are_right_and_the_target_is_sure():
    """Seen on code of the embedded pair: one of twelve rows before those of sixteen."""
    policy = believing(costs(1.95, 0.65), 0.89, 0.93)
    assert [policy.start().width(64, WIDEST, at) for at in (0.9999, 0.99)] == [WIDEST, 12]


@pytest.mark.parametrize("draft, first", [(0.2, 0), (0.4, 0), (0.5, 26), (0.7, 40)])
def test_what_can_lose_a_part_of_a_token_is_tried_at_once(draft, first):
    """Though the target is unsure, and again once most of the loss is forgotten.

    What can lose more waits until that is a small part of the answer.
    """
    pair = costs(1.8, draft)
    request, seconds = Policy(pair, WIDEST).start(), pair.rounds(64, WIDEST)
    widths = spell(request, 50, 0.7)
    tried = [at for at, width in enumerate(widths) if width > 1]
    assert first <= tried[0] <= first + 2 and (first or len(tried) > 1)
    assert max(seconds[width - 1] for width in widths[:8]) <= 1 + RISK
    assert max(seconds[width - 1] for width in widths) <= 1 + STAKE


def test_two_cheap_drafts_that_fail_keep_a_drafter_waiting_for_one_token():
    """Seen with SmolLM2, half of whose first slots are right: it was for three, and more."""
    request = believing(costs(1.2, 0.15), 0.5, 0.6).start()
    widths = spell(request, 12, 0.7)
    assert [at for at, width in enumerate(widths) if width > 1][:3] == [0, 1, 3]


def test_what_little_is_grows_with_the_answer():
    """Drafts in vain that are a large part of a short answer are a small one of a longer one."""
    waits = []
    for before in (0, 20):
        account = Account()
        for cost in (*[1.0] * before, *[1.4] * 4):
            account.book(cost, 1)
        waits.append(0)
        while account.stake < 0.4:
            account.book(1.0, 1)
            waits[-1] += 1
    assert waits[0] > 2 * waits[1]


def spell(request, rounds, certainty):
    """The widths of some rounds in which drafts are all wrong."""
    widths = []
    for _ in range(rounds):
        widths.append(request.width(64, WIDEST, certainty))
        request.observe(widths[-1] - 1, 0)
    return widths
