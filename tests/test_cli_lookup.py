"""The command line without a published drafter: lookup, nothing, or a lookup beside a network."""

import json

import pytest
import tinymodels
from program import run

import dflash_mlx as dm
from dflash_mlx.drafter.beside import Beside
from dflash_mlx.drafter.lookup import Lookup
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
    assert "No drafter is known" in said and "--draft" in said


@pytest.mark.parametrize(("draft", "rows"), [("none", 1), ("lookup", 16)])
def test_draft_says_what_drafts(folder, draft, rows):
    options = ["-n", "12", "--json", "--no-compare", "--no-policy"]
    done = run("generate", QUESTION, "--model", folder, "--draft", draft, *options)
    content = json.loads(done.stdout)
    assert content["block_size"] == rows and "No drafter" not in done.stderr


def test_trees_need_a_network():
    done = run("generate", "hi", "--draft", "lookup", "--tree-budget", "8")
    assert done.returncode == 2 and "--draft lookup" in done.stderr


def test_the_library_knows_the_same_names(folder):
    name = str(folder)
    with pytest.warns(UserWarning, match="no drafter is known for .*, so its text is drafted by"):
        assert isinstance(dm.load(name)[1], Lookup)
    assert isinstance(dm.load(name, draft="lookup")[1], Lookup)
    assert dm.load(name, draft="none")[1] is None
    assert isinstance(dm.load("tiny", draft="+lookup")[1], Beside)
    assert isinstance(dm.load("tiny", draft="tiny-dflash2+lookup")[1], Beside)


def test_names_that_say_nothing_are_refused(folder):
    with pytest.raises(SettingsError, match="name a network before"):
        dm.load(str(folder), draft="lookup+lookup")
    with pytest.raises(SettingsError, match="no weights to quantize"):
        dm.load(str(folder), draft="lookup", draft_bits=4)
    with pytest.raises(ModelNotFoundError, match="owner/name"):
        dm.load("a-mistyped-name")
