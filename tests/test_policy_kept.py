"""What one start of the program learns of a pair's drafts, the next one begins with."""

import json
import random

import numpy as np
import pytest
from test_policy import WIDEST, costs
from tinymodels import random_drafter, target

from dflash_mlx.policy import costs as costs_module
from dflash_mlx.policy.beliefs import FIRST, LEVELS, Beliefs, warmth
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.kept import FORMAT, WEIGHT, beliefs_file, keep_beliefs, read_beliefs
from dflash_mlx.policy.widths import Policy

SURE = len(LEVELS) - 1


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What begins such a start, of a pair whose costs and beliefs lie in a folder of their own."""
    points = {64: {1: 1.0, 16: 2.0}}, {64: {1: 0.0, 16: 0.5}}
    monkeypatch.setattr(costs_module, "measure", lambda *_: Costs(*points))
    monkeypatch.setattr(costs_module, "_cache_folder", lambda: tmp_path)
    pair = target("qwen3"), random_drafter()
    return lambda: Policy.of(*pair)


def taught(policy, drafts=40, accepted=3, temperature=0.0):
    """The policy, after so many drafts of which so many slots were right."""
    request = policy.start(temperature)
    for _ in range(drafts):
        request.learn(SURE, policy.widest - 1, accepted)
    return policy


def test_the_next_start_begins_with_what_was_learnt(started):
    first = taught(taught(started(), temperature=0.0), accepted=0, temperature=0.8)
    first.keep()
    second = started()
    for temperature in (0.0, 0.8):
        known, before = (policy.beliefs(temperature) for policy in (second, first))
        new = Beliefs(second.widest - 1).rates(SURE)
        assert known.rounds == pytest.approx(WEIGHT * before.rounds)
        slots = enumerate(zip(known.rates(SURE), before.rates(SURE), new, strict=True))
        for slot, (kept, learnt, guessed) in slots:
            assert abs(kept - learnt) <= abs(guessed - learnt) / 2, slot
    assert second.beliefs(0.3).rounds == 0


def test_a_start_that_learns_nothing_leaves_what_is_known(started):
    taught(started()).keep()
    file = beliefs_file(started().file)
    before = file.read_bytes()
    for _ in range(3):
        idle = started()
        idle.start().observe(0, 0)  # a plain round
        idle.keep()
    assert file.read_bytes() == before
    again = started()
    taught(again, drafts=1).keep()
    assert file.read_bytes() != before


def test_what_was_not_drafted_at_is_not_forgotten(started):
    """Five greedy answers, and what was known of temperature 0.8 was next to nothing."""
    taught(started(), temperature=0.8).keep()
    known = started().beliefs(0.8).evidence()
    for _ in range(5):
        taught(started(), drafts=1).keep()
    again = started().beliefs(0.8).evidence()
    for name in known:
        np.testing.assert_allclose(again[name], known[name])


def test_nothing_is_kept_where_nothing_was_drafted_or_costs_are_not(started, tmp_path):
    policy = started()
    policy.keep()
    assert not beliefs_file(policy.file).exists()
    nowhere = Policy(costs(1.8, 0.4), WIDEST)
    taught(nowhere).keep()
    (tmp_path / "a file").touch()
    unwritable = Policy(costs(1.8, 0.4), WIDEST, tmp_path / "a file" / "pair.json")
    taught(unwritable).keep()
    assert read_beliefs(beliefs_file(unwritable.file), WIDEST - 1) == {}


def test_kept_beliefs_are_all_of_the_evidence(tmp_path):
    luck, beliefs = random.Random(3), Beliefs(WIDEST - 1)
    for _ in range(100):
        drafted = luck.randint(1, WIDEST - 1)
        beliefs.learn(luck.randrange(len(FIRST)), drafted, luck.randint(0, drafted))
    file = tmp_path / "beliefs.json"
    keep_beliefs(file, {warmth(0.7): beliefs})
    evidence = json.loads(file.read_text())["beliefs"][str(warmth(0.7))]
    whole = Beliefs(WIDEST - 1, evidence)
    for level in range(len(FIRST)):
        assert whole.rates(level) == beliefs.rates(level)
        assert whole.hope(level) == beliefs.hope(level)


def counts(**changed):
    """A file's content, with some of its counts changed."""
    evidence = Beliefs(WIDEST - 1).evidence() | changed
    return json.dumps({"format": FORMAT, "beliefs": {"0": evidence}})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "\x00\xff",
        json.dumps({"format": FORMAT}),
        json.dumps({"format": FORMAT, "beliefs": 3}),
        json.dumps({"format": FORMAT, "beliefs": {"0": {}}}),
        json.dumps({"format": FORMAT, "beliefs": {"warm": {}}}),
        counts().replace('"0"', '"-5"'),
        counts().replace('"0"', '"99"'),
        counts(tried=[1.0]),
        counts(tried=[0.0] * len(FIRST), hit=[1.0] * len(FIRST)),
        counts(tried=[float("nan")] * len(FIRST)),
        counts(tried=[float("inf")] * len(FIRST)),
        counts(hit=[-1.0] * len(FIRST)),
        counts(tried=[10**400] * len(FIRST)),
        "[" * 10**5,
        counts(reached=[["1"] * (WIDEST - 2)] * len(FIRST)),
        counts(reached=[0.0] * (WIDEST - 2), right=[0.0] * (WIDEST - 2)),
        counts(reached=[[0.0] * WIDEST] * len(FIRST), right=[[0.0] * WIDEST] * len(FIRST)),
        counts(reached=[[0.0] * WIDEST, [0.0]]),
    ],
)
def test_a_damaged_file_is_said_and_learnt_anew(tmp_path, content):
    file = tmp_path / "beliefs.json"
    file.write_text(content)
    with pytest.warns(UserWarning, match="is damaged: how often drafts are right is learnt anew"):
        assert read_beliefs(file, WIDEST - 1) == {}


def test_a_folder_in_the_files_place_is_said(tmp_path):
    (tmp_path / "beliefs.json").mkdir()
    with pytest.warns(UserWarning, match="is damaged"):
        assert read_beliefs(tmp_path / "beliefs.json", WIDEST - 1) == {}


def test_what_another_version_kept_is_left_aside(tmp_path, recwarn):
    file = tmp_path / "beliefs.json"
    first = {"tried": [1.0] * 7, "hit": [1.0] * 7, "reached": [1.0] * 14, "right": [1.0] * 14}
    for kept in ({"format": 1, "beliefs": {"0": first}}, {"format": FORMAT + 1, "levels": 7}):
        file.write_text(json.dumps(kept))
        assert read_beliefs(file, WIDEST - 1) == {} and not recwarn.list


def test_a_drafter_that_is_known_is_given_its_width_from_the_first_round(started):
    """What it is for: drafts that end after three tokens get four rows at once, not sixteen."""

    def first_width():
        return started().start().width(64, WIDEST, 0.9999)

    assert first_width() > 8
    taught(started()).keep()
    assert 2 <= first_width() <= 5
