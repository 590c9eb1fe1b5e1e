"""The registry: well-formed, without doubles, and found by every name a target has."""

import pytest

from dflash_mlx.errors import ModelNotFoundError
from dflash_mlx.registry import drafter_for, pairs


def test_every_row_is_a_pair_of_repositories():
    assert pairs()
    for pair in pairs():
        for name in (pair.drafter, *pair.targets):
            owner, _, repository = name.partition("/")
            assert owner and repository and "/" not in repository and name == name.strip()
        assert pair.targets


def test_no_target_is_listed_twice():
    # The last part alone is looked up, so that is what must be unique.
    names = [name.rpartition("/")[2].lower() for pair in pairs() for name in pair.targets]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "mlx-community/Qwen3-8B-4bit",
        "qwen/qwen3-8b",
        "/models/Qwen3-8B",
        "~/models/Qwen3-8B-bf16/",
        "./Qwen3-8B",
        "somebody/Qwen3-8B",
    ],
)
def test_a_drafter_is_found_by_repository_and_by_folder(name):
    assert drafter_for(name) == "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8", "Qwen3-8B-Base", "", "/"])
def test_an_unknown_target_asks_for_its_drafter(name):
    with pytest.raises(ModelNotFoundError, match="draft="):
        drafter_for(name)
