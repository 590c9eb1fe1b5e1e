"""The command line without a published drafter: lookup, nothing, or a lookup beside a network."""

import json

import pytest
import tinymodels
from program import run

import dflash_mlx as dm
from dflash_mlx.drafter.lookup import CombinedDrafter, LookupDrafter
from dflash_mlx.errors import ModelNotFoundError, SettingsError

QUESTION = "user: user: user: what is 37 + 48?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tinymodels.save_target(tmp_path_factory.mktemp("some") / "model")


def test_a_model_without_a_known_drafter_is_drafted_by_lookup_and_says_so(folder):
    done = run(
        "generate", QUESTION, "--model", folder, "-n", "40", "--json", "--no-policy", "--compare"
    )
    content = json.loads(done.stdout)
    assert content["identical"] and max(map(int, content["widths"])) > 1
    [said] = [line for line in done.stderr.splitlines() if "lookup" in line]
    assert "No drafter is known" in said


def test_the_library_knows_the_same_names(folder):
    name = str(folder)
    with pytest.warns(UserWarning, match="no drafter is known for .*, so its text is drafted by"):
        assert isinstance(dm.load(name)[1], LookupDrafter)
    assert isinstance(dm.load(name, draft="lookup")[1], LookupDrafter)
    assert dm.load(name, draft="none")[1] is None
    for draft in (None, "+lookup", "tiny+lookup", "tiny-dflash2+lookup"):
        assert isinstance(dm.load("tiny", draft=draft)[1], CombinedDrafter)
    assert not isinstance(dm.load("tiny", draft="tiny")[1], CombinedDrafter)
    with pytest.raises(ModelNotFoundError, match="No model ''"):
        dm.load("tiny", draft="")


def test_names_that_say_nothing_are_refused(folder):
    with pytest.raises(SettingsError, match="name a network before"):
        dm.load(str(folder), draft="lookup+lookup")
    with pytest.raises(SettingsError, match="draft_bits means nothing to lookup"):
        dm.load(str(folder), draft="lookup", draft_bits=4)
    with pytest.raises(ModelNotFoundError, match="owner/name"):
        dm.load("a-mistyped-name")


def test_whatever_is_wrong_with_a_drafter_it_is_said_what_drafts_without_one(folder, tmp_path):
    """A name that is none, what is no drafter, one known not to load, one of another target."""
    refused = "Hikari07jp/DSpark-Gemma-4-31B-draft"
    for name, draft in (
        ("tiny", "a-mistyped-name"),
        ("tiny", str(folder)),
        ("tiny", refused),
        (str(folder), "tiny-dflash2"),
    ):
        with pytest.raises(dm.DFlashError) as caught:
            dm.load(name, draft=draft)
        assert "--draft lookup" in str(caught.value) and "--draft none" in str(caught.value)
