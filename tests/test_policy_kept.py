"""What a start of the program knows from those before it: how often a pair's drafts were right."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy import DRAFTERS, WIDEST, costs, run
from tinymodels import random_drafter, target

from dflash_mlx.policy import costs as costs_module
from dflash_mlx.policy.beliefs import KEPT, LEVELS, UNKNOWN, Beliefs
from dflash_mlx.policy.costs import keep_costs, pair_costs
from dflash_mlx.policy.widths import Policy

DRAFTS = st.lists(
    st.tuples(st.integers(0, UNKNOWN), st.integers(1, WIDEST - 1), st.floats(0, 1)), max_size=200
)
PAIR = costs(1.8, 0.4)


def learnt(drafts):
    beliefs = Beliefs(WIDEST - 1)
    for at, drafted, share in drafts:
        beliefs.learn(at, drafted, round(share * drafted))
    return beliefs


@given(DRAFTS)
def test_what_is_kept_is_what_was_learnt_and_soon_gives_way(drafts):
    before = learnt(drafts)
    record = json.loads(json.dumps(before.record()))
    after = Beliefs.read(WIDEST - 1, record)
    for at in range(UNKNOWN + 1):
        tried, hit = record["levels"][0][at], record["levels"][1][at]
        assert after.rates(at)[0] == pytest.approx(before.rates(at)[0], abs=0.1)
        if tried <= KEPT:
            assert after.rates(at)[0] == pytest.approx(before.rates(at)[0], abs=0.01)
        elif hit >= tried / 2:  # as many rounds that say the opposite weigh more
            for _ in range(int(2 * KEPT)):
                after.learn(at, 1, 0)
            assert after.rates(at)[0] < 0.5


@given(DRAFTS, st.integers(0, UNKNOWN), st.booleans())
def test_one_draft_says_little_against_what_is_kept(drafts, at, right):
    beliefs = Beliefs.read(WIDEST - 1, learnt([*drafts, *[(at, 15, 0.5)] * 40]).record())
    before = beliefs.rates(at)[0]
    beliefs.learn(at, 15, 15 * right)
    assert abs(beliefs.rates(at)[0] - before) < 0.06


def test_the_next_start_begins_where_this_one_ended(tmp_path):
    """Drafts are right although the target is unsure, which nobody would believe at first."""
    file = tmp_path / "new" / "pair.json"
    first = Policy(PAIR, WIDEST, file)
    assert first.start().width(64, WIDEST, 0.5) == 1
    first.keep()
    assert not file.exists(), "nothing was learnt"
    for _ in range(40):
        first.start().learn(0, 15, 15)
    first.keep()
    assert [each.name for each in file.parent.iterdir()] == ["pair.json"]
    assert "kept for the next start" in "\n".join(first.describe(64))
    second = Policy(PAIR, WIDEST, file)
    assert second.start().width(64, WIDEST, 0.5) == WIDEST
    assert second.start(temperature=1.0).width(64, WIDEST, 0.5) == 1, "another record"
    written = file.read_bytes()
    second.keep()
    assert file.read_bytes() == written


def test_each_class_of_temperatures_has_a_record_of_its_own():
    policy = Policy(PAIR, WIDEST)
    for temperature, right in ((0.0, 15), (0.7, 0), (1.0, 0), (1.3, 15)):
        for _ in range(20):
            policy.start(temperature).learn(len(LEVELS) - 1, 15, right)
    rates = [policy.beliefs(t).rates(len(LEVELS) - 1)[0] for t in (0.0, 0.3, 0.8, 1.0, 2.0)]
    assert rates[0] > 0.95 and rates[2] == rates[3] < 0.1 and rates[4] > 0.95
    assert rates[1] == Beliefs(WIDEST - 1).rates(len(LEVELS) - 1)[0]
    assert sum("first drafts are" in line for line in policy.describe(64)) == 3


GOOD = Beliefs(WIDEST - 1).record()
DAMAGED = {
    "no JSON": "{",
    "no object": "[1]",
    "records are none": '{"beliefs": 3}',
    "no class": json.dumps({"beliefs": {"warm": GOOD}}),
    "levels are missing": json.dumps({"beliefs": {"0": {"slots": GOOD["slots"]}}}),
    "other levels": json.dumps({"beliefs": {"0": GOOD | {"levels": [[1.0], [1.0]]}}}),
    "more hits than rounds": json.dumps(
        {"beliefs": {"0": GOOD | {"levels": [[1.0] * 7, [2.0] * 7]}}}
    ),
    "no numbers": json.dumps({"beliefs": {"0": GOOD | {"slots": [["x"] * 14, ["x"] * 14]}}}),
    "NaN": json.dumps({"beliefs": {"0": GOOD | {"levels": [[float("nan")] * 7] * 2}}}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_line_and_a_fresh_start(content, tmp_path):
    file = tmp_path / "pair.json"
    file.write_text(content)
    with pytest.warns(UserWarning, match="is damaged: how often drafts are right is learnt anew"):
        policy = Policy(PAIR, WIDEST, file)
    assert policy.beliefs().record() == GOOD
    run(policy, PAIR, DRAFTERS["trained"], 100)
    policy.keep()
    assert Policy(PAIR, WIDEST, file).beliefs().rounds > 0


def test_measuring_again_forgets(tmp_path, monkeypatch):
    """And a damaged file says so in one line, and is measured anew."""
    monkeypatch.setattr(costs_module, "_cache_folder", lambda: tmp_path)
    pair = target("qwen3"), random_drafter()

    def measured(*arguments):
        return PAIR

    costs_of = pair_costs(*pair, WIDEST, measured=measured)
    (file,) = tmp_path.iterdir()
    keep_costs(file, costs_of, {"0": learnt([(0, 15, 1.0)] * 9).record()})
    assert pair_costs(*pair, WIDEST, measured=measured) == PAIR
    assert Policy(PAIR, WIDEST, file).beliefs().rounds > 8
    pair_costs(*pair, WIDEST, measured=measured, again=True)
    assert Policy(PAIR, WIDEST, file).beliefs().rounds == 0
    file.write_text("[")
    with pytest.warns(UserWarning, match="is damaged: costs are measured anew"):
        assert pair_costs(*pair, WIDEST, measured=measured) == PAIR
