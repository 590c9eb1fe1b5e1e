"""Checks of foreign input: JSON files, numbers, paths, and error messages of one line."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.errors import ConfigError, DataError, DFlashError, WeightsError
from dflash_mlx.validation import (
    ErrorWrapper,
    TokenizersError,
    brief,
    is_finite,
    is_positive,
    parse_json,
    path_kind,
    read_json,
    text_config,
    user_path,
)


def test_a_json_object_is_read(tmp_path):
    content = {"ñ": [1, 2.5, None, {"deep": True}]}
    (tmp_path / "x.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "x.json") == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "an object is expected|a JSON object is expected"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xff{}", "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_that_is_not_an_object_is_refused(content, message, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_json(tmp_path / "x.json", DataError)
    assert str(tmp_path / "x.json") in str(caught.value)


def test_path_kind_distinguishes_folders_files_other_kinds_and_absent_paths(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_nothing").symlink_to(tmp_path / "nothing")
    (tmp_path / "to_file").symlink_to(file)
    assert path_kind(tmp_path) == "folder"
    assert path_kind(file) == path_kind(tmp_path / "to_file") == "file"
    assert path_kind(tmp_path / "pipe") == path_kind("/dev/null") == "other"
    for absent in (tmp_path / "nothing", tmp_path / "to_nothing", file / "below"):
        assert path_kind(absent) is None


def test_a_path_that_cannot_be_examined_is_an_error(tmp_path):
    """`Path.exists` of Python 3.14 and later would say that it does not exist."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="File name too long"):
        path_kind(tmp_path / ("a" * 300))
    with pytest.raises(OSError, match="Too many levels"):
        path_kind(tmp_path / "loop")


def test_user_path_expands_only_known_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert str(user_path("~/x")) == "/home/me/x" and str(user_path("/~/x")) == "/~/x"
    assert str(user_path("~no-such-user/x")) == "~no-such-user/x"


def test_a_huge_file_is_not_read(tmp_path):
    """A sparse file, which takes no room on the disk."""
    with (tmp_path / "x.json").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(ConfigError, match="1,099,511,627,776 bytes"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("value", [10**400, -(10**400), math.nan, math.inf, "1", None, True, [1]])
def test_other_values_are_not_finite_numbers(value):
    assert not is_finite(value) and not is_positive(value)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**300), 10**300))
def test_finite_numbers(value):
    assert is_finite(value)
    assert is_positive(value) == (value > 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(json_values | st.just(10**5000) | st.just({"a": [10**5000]}) | st.text(min_size=200))
def test_brief_shows_every_value_in_one_short_line(value):
    message = str(ConfigError(f"field must be small, not {brief(value)}."))
    assert len(message.splitlines()) == 1 and len(brief(value)) <= 60


@given(st.text())
def test_an_error_is_one_line_whatever_is_in_it(text):
    assert len(str(DFlashError(f"/a/{text}/b: is broken.")).splitlines()) == 1
    assert "\x1b" not in str(DFlashError(text))


def test_the_error_of_parse_json_names_where_the_json_is_from():
    with pytest.raises(WeightsError, match="^here: not valid JSON"):
        parse_json(b"{", "here", WeightsError)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (KeyError("hidden_size"), "It broke (KeyError: 'hidden_size')."),
        (ValueError("of two\nlines."), "It broke (of two lines)."),
        (Exception("from Rust"), "It broke (from Rust)."),
        (ZeroDivisionError("not named"), None),
        (LookupError("its base class"), None),
        (type("Surprise", (Exception,), {})("not bare"), None),
        (WeightsError("ours"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=repr,
)
def test_the_named_errors_of_a_library_become_ours(raised, message):
    classes = (KeyError, ValueError, TokenizersError)
    with (
        pytest.raises(ConfigError if message else type(raised)) as caught,
        ErrorWrapper(ConfigError, "It broke", classes),
    ):
        raise raised
    if message:
        assert str(caught.value) == message and caught.value.__cause__ is raised


def test_the_part_of_a_config_that_is_about_text():
    """Multimodal models have a `text_config`; one that is empty or no object is ignored."""
    assert text_config({"text_config": {"hidden_size": 8}, "hidden_size": 9}) == {"hidden_size": 8}
    for ignored in ({}, {"text_config": {}}, {"text_config": None}, {"text_config": "qwen3"}):
        assert text_config(ignored | {"hidden_size": 9})["hidden_size"] == 9
