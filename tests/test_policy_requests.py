"""One request beside another, the target's certainty, and costs that turn out to be wrong."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy import DRAFTERS, WIDEST, costs, run

from dflash_mlx.errors import SettingsError
from dflash_mlx.policy.account import ALLOWANCE, CREDIT
from dflash_mlx.policy.beliefs import (
    ELSEWHERE,
    LEVELS,
    MEMORY,
    RECENT,
    UNKNOWN,
    Beliefs,
    Certainty,
    Mood,
)
from dflash_mlx.policy.costs import Costs, read_costs
from dflash_mlx.policy.watch import BELIEVED, SEEN
from dflash_mlx.policy.widths import TRIAL_ROWS, Policy

SURE, UNSURE = 0.9999, 0.4


def test_requests_side_by_side_are_as_each_alone():
    """A second request's width, asked for between a first one's width and outcome, moves nothing.

    The beliefs of the pair are shared on purpose; with drafts that are never verified they rest.
    """
    pair = costs(1.8, 0.4)
    alone, beside, other = Policy(pair, WIDEST).start(), Policy(pair, WIDEST), None
    first, other = beside.start(), beside.start()
    for _ in range(20):
        widths = [alone.width(64, WIDEST), first.width(64, WIDEST)]
        other.width(64, WIDEST)
        other.width(2048, 1)
        assert widths[0] == widths[1]
        for request, width in ((alone, widths[0]), (first, widths[1])):
            request.observe(width - 1, width - 1)
        assert alone.affordable == first.affordable


def spell(request, pair, rounds, right, certainty):
    """The widths of some rounds in which drafts are all right, or all wrong."""
    widths = []
    for _ in range(rounds):
        widths.append(request.width(64, WIDEST, certainty))
        request.observe(widths[-1] - 1, (widths[-1] - 1) * right)
    return widths


@pytest.mark.parametrize("draft", [0.1, 0.4, 0.75])
def test_a_bad_start_is_forgotten_where_the_target_is_sure(draft):
    """A text that begins where drafts are wrong: it is drafted soon where they are right."""
    pair = costs(1.8, draft)
    request = Policy(pair, WIDEST).start()
    bad = spell(request, pair, 16, False, UNSURE)
    good = spell(request, pair, 4, True, SURE)
    assert sum(width > 1 for width in bad) <= 6 and good[2:] == [WIDEST] * 2


@pytest.mark.parametrize("draft, longest, least", [(0.1, 12, 5), (0.4, 16, 4), (0.75, 22, 4)])
@pytest.mark.parametrize("wrong", [1, 2, 4, 8, 12])
def test_one_wrong_guess_is_no_reason_to_stop_looking(draft, longest, least, wrong):
    """Drafts are wrong at first although the target is sure, and right soon after.

    Such a start loses one whole block. Looking again must not wait until that is earned back.
    """
    pair = costs(1.8, draft)
    request = Policy(pair, WIDEST).start()
    bad = spell(request, pair, wrong, False, SURE)
    good = spell(request, pair, 16, True, SURE)
    assert bad[0] >= 8 and sum(width > 1 for width in bad) <= 4
    waited = next((place for place, width in enumerate(good) if width >= 8), len(good))
    assert waited <= max(least, longest - wrong)


def test_nothing_is_tried_where_little_is_left():
    """What a try would teach comes too late for the request, so what is believed decides."""
    request = Policy(costs(1.8, 0.3), WIDEST).start()
    for _ in range(10):
        assert request.width(64, 1, UNSURE) == 1
        request.observe(0, 0)
    assert request.width(64, WIDEST, UNSURE) > 1
    for left in (2, 5, WIDEST - 1):
        assert request.width(64, left, UNSURE) == 1
        assert request.width(64, left, SURE) == left


@given(st.lists(st.tuples(st.integers(1, 15), st.floats(0, 1)), max_size=60), st.floats(0.01, 0.99))
def test_a_mood_follows_what_drafts_brought_and_is_forgotten(drafts, rate):
    """It never turns the order of rates round, and goes back to none."""
    mood, right, wrong = Mood(), Mood(), Mood()
    for drafted, share in drafts:
        mood.learn([rate] * 15, drafted, round(share * drafted))
        right.learn([rate] * 15, drafted, drafted)
        wrong.learn([rate] * 15, drafted, 0)
    for each in (mood, right, wrong):
        low, high = each.moved([0.9 * rate, rate])
        assert 0 < low < high < 1
    if drafts:
        assert next(wrong.moved([rate])) < rate < next(right.moved([rate]))
    mood.pass_by(2000)
    assert next(mood.moved([rate])) == pytest.approx(rate, abs=1e-6)


def test_a_mood_comes_near_to_what_drafts_are_and_goes_no_farther():
    """Nine of ten are right where half was believed: each tells less, the nearer it is."""
    mood = Mood()
    for number in range(400):
        mood.learn([0.5], 1, int(number % 10 > 0))
    assert 0.85 < next(mood.moved([0.5])) < 0.9


TOKENS = st.lists(st.tuples(st.integers(0, 15), st.floats(0, 1)), max_size=12)


@given(TOKENS)
def test_certainty_is_a_mean_in_which_right_drafts_are_certain(rounds):
    certainty, every = Certainty(), []
    assert certainty.mean is None
    for accepted, last in rounds:
        certainty.take(accepted + 1, last)
        every += [1.0] * accepted + [last]
        before = [1.0] * 200  # the text before the answer is given
        weights = [RECENT**age for age in reversed(range(len(before + every)))]
        mean = sum(w * p for w, p in zip(weights, before + every, strict=True)) / sum(weights)
        assert certainty.mean == pytest.approx(mean)
    known = certainty.mean
    certainty.take(3, None)
    assert certainty.mean == known


def test_a_sure_token_among_doubtful_ones_is_no_reason_to_draft():
    """The end of a word in a text that the drafter knows nothing about, and the same at ease."""
    widths = []
    for before in (0.5, 1.0):
        certainty, request = Certainty(), Policy(costs(1.8, 0.75), WIDEST).start()
        for probability in (before, before, before, 1.0):
            certainty.take(1, probability)
        widths.append(request.width(64, WIDEST, certainty.mean))
    assert widths == [1, WIDEST]


def test_certainty_that_says_nothing_is_learnt_to_say_nothing():
    """Drafts are right at 0.9 whether the target is sure or not: both are drafted in the end."""
    pair, luck, policy = costs(1.8, 0.1), random.Random(0), Policy(costs(1.8, 0.1), WIDEST)
    request, wide = policy.start(), {SURE: 0, UNSURE: 0}
    for number in range(600):
        certainty = luck.choice((SURE, UNSURE))
        width = request.width(64, WIDEST, certainty)
        accepted = next((n for n in range(width - 1) if luck.random() > 0.9), width - 1)
        request.observe(width - 1, accepted)
        wide[certainty] += width > 8 and number >= 300
    assert wide[SURE] > 100 and wide[UNSURE] > 100, pair


def under_load(pair, wrong):
    """The costs as a busy machine would have measured them: some widths many times too dear."""
    verify = {64: {row: cost * wrong(row) for row, cost in pair.verify[64].items()}}
    return Costs(verify, pair.draft)


LOADS = {
    "every drafted width": lambda row: 4.0 if row > 1 else 1.0,
    "wide ones": lambda row: 4.0 if row > 4 else 1.0,
    "plain decoding": lambda row: 0.3 if row == 1 else 1.0,
    "all alike": lambda row: 3.0,
}


@pytest.mark.parametrize("load", LOADS)
def test_costs_measured_under_load_are_corrected_within_200_tokens(load):
    pair = costs(1.8, 0.4)
    truth, policy = pair.rounds(64, WIDEST), Policy(under_load(pair, LOADS[load]), WIDEST)
    request, luck, made, widths = policy.start(), random.Random(1), 0, []
    while made < 200:
        width = request.width(64, WIDEST, SURE)
        accepted = next((n for n in range(width - 1) if luck.random() > 0.93), width - 1)
        # A round's own time wavers by a few percent.
        request.observe(width - 1, accepted, truth[width - 1] * luck.uniform(0.97, 1.06))
        made += accepted + 1
        widths.append(width)
    free, _ = run(Policy(pair, WIDEST), pair, DRAFTERS["trained"], 300)
    assert free > 2 and sum(width >= 12 for width in widths[-5:]) >= 4, widths
    assert policy.watch.disagrees == (load != "all alike")
    said = "\n".join(policy.describe(64))
    assert ("the measured costs are wrong" in said) == policy.watch.disagrees


def test_dear_widths_are_tried_no_more_often_than_it_takes_to_believe_it():
    pair, widths = costs(16.0, 0.5), []
    truth, request = pair.rounds(64, WIDEST), Policy(pair, WIDEST).start()
    for _ in range(300):
        widths.append(request.width(64, WIDEST, SURE))
        request.observe(widths[-1] - 1, min(widths[-1] - 1, 3), truth[widths[-1] - 1])
    assert widths.count(TRIAL_ROWS) == BELIEVED and set(widths) == {1, TRIAL_ROWS}


def test_a_request_that_goes_on_hears_what_its_rounds_say():
    policy = Policy(costs(1.8, 0.4), WIDEST)
    request, seconds = policy.start(), policy.seconds(64)
    request.look(64, SURE)
    before = request.speed(8)
    for _ in range(20):
        for rows, off in ((1, 1.0), (8, 1.1)):
            policy.watch.saw(rows, off * seconds[rows - 1], seconds[rows - 1])
    request.look(64, SURE)
    assert request.speed(8) < 0.96 * before and not policy.watch.disagrees


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("load", [load for load in LOADS if load != "all alike"])
def test_corrected_costs_are_kept_for_the_next_start(load, seed, tmp_path):
    """What was measured under load is right in the file after an answer, and never measured."""
    pair, luck, file = costs(1.8, 0.4), random.Random(seed), tmp_path / "costs" / "pair.json"
    wrong, truth = under_load(pair, LOADS[load]), pair.rounds(64, WIDEST)
    policy = Policy(wrong, WIDEST, file)
    request = policy.start()
    policy.keep()
    assert not file.exists(), "nothing is known to be wrong"
    for _ in range(60):
        width = request.width(64, WIDEST, SURE)
        accepted = next((n for n in range(width - 1) if luck.random() > 0.93), width - 1)
        request.observe(width - 1, accepted, truth[width - 1] * luck.uniform(0.97, 1.06))
    assert "the next start too" in policy.describe(64)[-1]
    policy.keep()
    again = read_costs(file).rounds(64, WIDEST)
    for row in policy.watch.factors():
        assert again[row - 1] == pytest.approx(truth[row - 1], rel=0.08)
        assert again[-1] == pytest.approx(truth[-1], rel=0.08)


def test_quick_plain_rounds_earn_nothing():
    """Their times waver; else every second one would be a gain, and pay for another wrong draft."""
    pair, luck, affordable = costs(1.8, 0.4), random.Random(1), []
    for noise in (0.0, 0.3):
        request = Policy(pair, WIDEST).start()
        for _ in range(40):
            request.look(64, UNSURE)
            request.observe(0, 0, 1 + noise * luck.uniform(-1, 1))
        affordable.append(request.affordable)
    assert affordable[0] == affordable[1]


def test_widths_that_no_round_had_keep_their_costs(tmp_path):
    """After short answers the file held 1 and 2 rows alone, and 16 followed from them."""
    pair, file = costs(1.8, 0.4), tmp_path / "costs" / "pair.json"
    policy = Policy(pair, WIDEST, file)
    measured = pair.rounds(64, WIDEST)
    for _ in range(SEEN):
        policy.watch.saw(1, measured[0], measured[0])
        policy.watch.saw(2, 1.5 * measured[1], measured[1])
    policy.keep()
    again = read_costs(file).rounds(64, WIDEST)
    assert again == pytest.approx([measured[0], *(1.5 * each for each in measured[1:])], rel=0.01)


def test_a_plain_token_goes_by_the_pace_of_the_rounds():
    """The machine is three times as busy as when it measured: so a plain token takes longer too."""
    policy = Policy(costs(1.8, 0.4), WIDEST)
    assert policy.plain_seconds(64) == 1.0
    request, truth = policy.start(), costs(1.8, 0.4).rounds(64, WIDEST)
    for _ in range(3):
        width = request.width(64, WIDEST, SURE)
        request.observe(width - 1, width - 1, 3 * truth[width - 1])
    assert policy.plain_seconds(64) == pytest.approx(3.0)
    assert "3000.00 ms" in policy.describe(64)[0]


@pytest.mark.parametrize("context", [-1, 1.5, None])
def test_a_policy_is_described_for_a_number_of_tokens(context):
    with pytest.raises(SettingsError, match="context must be a whole number from 0"):
        Policy(costs(1.0, 0.0), 2).describe(context)


def test_a_plain_token_that_is_begun_ahead_is_what_drafting_has_to_beat():
    """A round on its own takes twice as long here: the host is as slow as the device."""
    quick, host = costs(1.0, 0.0), replace(costs(1.0, 0.0), ahead=0.5)
    alone, ahead = Policy(quick, 2), Policy(host, 2)
    assert (alone.plain_seconds(64), ahead.plain_seconds(64)) == (1.0, 0.5)
    assert "500.00 ms" in ahead.describe(64)[0] and "2 rows: 2.00 x plain" in ahead.describe(64)[1]
    # Two rows for one's time are at most twice as quick, which is what plain rounds are.
    requests = [of.start() for of in (alone, ahead)]
    assert [each.width(64, 2, SURE) for each in requests] == [2, 1]
    assert [each.free([0.9], 64, 2)[0] for each in requests] == [2, 1]
    corrected = replace(host, unread=0.25).corrected({1: 1.0, 2: 1.5}, 2)
    assert (corrected.ahead, corrected.unread) == (0.5, 0.25)


@pytest.mark.parametrize("ahead", [1.0, 0.5])
def test_what_may_be_lost_is_counted_in_plain_rounds_as_they_come(ahead):
    """Drafts that are right until they are trusted, and wrong from then on."""
    pair, spent, tokens = replace(costs(1.8, 1.0), ahead=ahead), 0.0, 0
    request, seconds = Policy(pair, WIDEST).start(), pair.rounds(64, WIDEST)
    while tokens < 600:
        width = request.width(64, WIDEST, SURE)
        accepted = (width - 1) * (tokens < 100)
        request.observe(width - 1, accepted)
        tokens += accepted + 1
        spent += seconds[width - 1] / ahead if width > 1 else 1.0
    assert spent <= (1 + ALLOWANCE) * tokens + CREDIT + 1


def test_rows_that_cost_nothing_may_not_lose_more_either():
    """Lookups that promise much and are never right, where a plain round alone is half waiting."""
    pair = Costs({64: dict.fromkeys((1, 16), 1.0)}, {64: dict.fromkeys((1, 16), 0.0)}, ahead=0.5)
    request, spent, tokens = Policy(pair, WIDEST).start(), 0.0, 600
    for _ in range(tokens):
        request.look(64, SURE)
        rows, _ = request.free([0.9] * 15, 64, WIDEST)
        if rows > 1:
            request.observe_free(rows, 0)
        else:
            request.observe(0, 0)
        spent += 2.0 if rows > 1 else 1.0
    assert tokens < spent <= (1 + ALLOWANCE) * tokens + CREDIT + 1


def test_a_long_plain_stretch_is_no_debt():
    """A plain round is the unit, though one on its own takes longer than those begun ahead."""
    request = Policy(replace(costs(1.8, 0.2), ahead=0.6), WIDEST).start()
    for _ in range(300):
        request.look(64, UNSURE)
        request.observe(0, 0)
    assert max(spell(request, None, 3, True, SURE)) == WIDEST


def test_each_class_of_temperatures_has_beliefs_of_its_own():
    policy = Policy(costs(1.8, 0.4), WIDEST)
    for temperature, right in ((0.0, 15), (0.7, 0), (1.0, 0), (1.3, 15)):
        for _ in range(20):
            policy.start(temperature).learn(len(LEVELS) - 1, 15, right)
    rates = [policy.beliefs(t).rates(len(LEVELS) - 1)[0] for t in (0.0, 0.3, 0.8, 1.0, 2.0)]
    assert rates[0] > 0.95 and rates[2] == rates[3] < 0.1 and rates[4] > 0.95
    assert rates[1] == Beliefs(WIDEST - 1).rates(len(LEVELS) - 1)[0]
    told = [line.partition(":")[0] for line in policy.describe(64) if "first drafts are" in line]
    assert told == ["temperature 0", "temperature up to 1", "temperature above 1"]


@pytest.mark.parametrize("at", range(len(LEVELS)))
def test_what_a_level_says_of_later_slots_counts_less_the_farther_away(at):
    """Whole blocks that were right in a text that the drafter knows say little of other texts."""
    beliefs, new = Beliefs(WIDEST - 1), Beliefs(WIDEST - 1)
    for _ in range(50):
        beliefs.learn(at, WIDEST - 1, WIDEST - 1)
    parts = [1 - (1 - beliefs.rates(n)[1]) / (1 - new.rates(n)[1]) for n in range(UNKNOWN)]
    bounds = [(0.9, 1.0), (0.7, 0.9), (0.4, 0.7), (0.1, 0.3), (0.0, 0.1), (0.0, 0.05)]
    for n, part in enumerate(parts):
        least, most = bounds[abs(n - at)]
        assert least < part < most, (n, part)
    assert beliefs.rates(UNKNOWN)[1] > 0.95


def test_what_is_learnt_where_certainty_is_unknown_counts_everywhere():
    beliefs = Beliefs(WIDEST - 1)
    for _ in range(50):
        beliefs.learn(UNKNOWN, WIDEST - 1, 1)
    assert all(beliefs.rates(at)[1] < 0.1 for at in range(UNKNOWN + 1))


DRAFTS = st.tuples(st.integers(0, UNKNOWN), st.integers(1, 15), st.integers(0, 15))


@given(st.lists(DRAFTS, max_size=12))
def test_what_is_known_of_later_slots_is_what_drafts_say_counted_anew(drafts):
    """Each counts by how far away its level is, and less for each later one that says something."""
    beliefs = Beliefs(WIDEST - 1)
    shape = UNKNOWN + 1, WIDEST - 2
    reached, right = np.zeros(shape), np.zeros(shape)
    for at, drafted, kept in drafts:
        accepted = min(drafted, kept)
        beliefs.learn(at, drafted, accepted)
        if accepted and drafted > 1:
            for level in range(UNKNOWN + 1):
                part = 1.0 if UNKNOWN in (at, level) else ELSEWHERE ** abs(at - level)
                for counts, slots in ((reached, min(accepted, drafted - 1)), (right, accepted - 1)):
                    more = part * (np.arange(WIDEST - 2) < slots)
                    counts[level] = MEMORY**part * counts[level] + more
    evidence = beliefs.evidence()
    assert np.allclose(evidence["reached"], reached) and np.allclose(evidence["right"], right)
