"""The publisher's sampling settings, as generation_config.json files have them."""

import json
import warnings

import pytest

from dflash_mlx.loading.folder import Folder

FILES = [
    (None, {}),
    ({"eos_token_id": 2}, {}),
    (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},  # Qwen3's
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
    ({"do_sample": True}, {"temperature": 1.0}),  # gpt-oss's
    ({"do_sample": False, "temperature": 0.7}, {}),
    ({"do_sample": True, "temperature": None, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
    ({"repetition_penalty": 1.05, "top_p": 0.8}, {"repetition_penalty": 1.05}),
]


@pytest.mark.parametrize(("content", "found"), FILES)
def test_what_a_file_means(content, found, tmp_path):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Folder(tmp_path).sampling_defaults == found


@pytest.mark.parametrize("text", ["{", "[]", '{"do_sample": true, "top_p": "x"}'])
def test_a_file_that_cannot_be_used_is_a_warning(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.warns(UserWarning, match=r"generation_config.json is not used"):
        assert Folder(tmp_path).sampling_defaults == {}
