"""Names of models: what is wrong with one, and what was meant."""

import json
import os

import pytest
from program import run, start

from dflash_mlx.errors import ConfigError, ModelNotFoundError, WeightsError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load
from dflash_mlx.loading.registry import (
    known_names,
    local_path,
    nearest,
    short,
)


@pytest.mark.parametrize(
    "name, first",
    [
        ("tinny", "tiny"),
        ("smolm2", "smollm2"),
        ("tiny-dflsh2", "tiny-dflash2"),
        ("qwen3-8b", "mlx-community/Qwen3-8B-4bit"),
        ("Qwen3/Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
        ("mlx-comunity/qwen3-8b-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("Qwen3-Coder-Next", "Qwen/Qwen3-Coder-Next"),
        ("z-lab/Qwen3-8B-DFlash", "z-lab/Qwen3-8B-DFlash-b16"),
    ],
)
def test_the_nearest_name_comes_first(name, first):
    assert nearest(name)[0] == first


def test_a_name_with_a_wrong_size_suggests_the_sizes_that_exist():
    assert {"Qwen/Qwen3-8B", "Qwen/Qwen3-4B"} <= set(nearest("Qwen/Qwen3-7B"))


@pytest.mark.parametrize("name", ["", "zzz", "/", "some/thing-else-entirely"])
def test_a_name_unlike_all_others_has_no_suggestion(name):
    assert nearest(name) == []


def test_a_known_name_is_not_suggested_for_itself():
    assert not [name for name in known_names() if name in nearest(name)]


def test_empty_folders_broken_configs_and_unknown_names_have_different_errors(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(ModelNotFoundError, match="an empty folder"):
        local_path(str(broken))
    (broken / "config.json").write_text('{"model_type": ')
    assert local_path(str(broken)) == broken
    with pytest.raises(ConfigError, match="not valid JSON"):
        _ = Folder(broken).config
    with pytest.raises(ModelNotFoundError, match="No model 'tinny'.*Did you mean tiny"):
        local_path("tinny")
    for name in ("./tinny", "nope.gguf", "folder/nope.GGUF"):
        with pytest.raises(ModelNotFoundError, match=f"No model '{name}': there is no such folder"):
            local_path(name)
    with pytest.raises(
        ModelNotFoundError, match="mean mlx-community/Qwen3-8B-4bit or Qwen/Qwen3-8B?"
    ):
        local_path("https://example.org/Qwen/Qwen3-8B/")
    (broken / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    local_path(str(broken))


def test_gguf_files_of_lm_studio_and_ollama_are_found_by_their_path(tmp_path):
    """LM Studio has a folder with one file, maybe in parts or with a projector. Ollama has a blob.

    A folder with several models is refused.
    """
    blob = tmp_path / "sha256-0123"
    other = tmp_path / "model"
    folder = tmp_path / "Qwen3-8B-GGUF"
    folder.mkdir()
    blob.write_bytes(b"GGUF")
    other.touch()
    with pytest.raises(ModelNotFoundError, match="model': it is an empty file; give"):
        local_path(str(other))
    names = [f"a-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    for name in (*names, "mmproj-F16.gguf"):
        (folder / name).write_bytes(b"GGUF")
    for path, file in ((blob, blob), (folder, folder / names[0])):
        assert local_path(str(path)) == file
    with pytest.raises(WeightsError, match="00001-of-00002.gguf: truncated"):
        load(str(folder))  # before a drafter is looked for
    (folder / "a-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*Q4_0.gguf.*Q8_0.gguf"):
        local_path(str(folder))


@pytest.mark.parametrize(
    "name, shown",
    [
        ("tiny", "tiny"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("./models/a.gguf", "a.gguf"),
        ("models/of/mine", "mine"),
        ("model.gguf", "model.gguf"),
    ],
)
def test_a_title_has_the_last_part_of_a_path(name, shown):
    assert short(name) == shown


def test_a_name_that_is_a_folder_is_shown_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert short("models/mine") == "mine"


@pytest.mark.parametrize(
    "name, message",
    [
        ("qwen3-8b", "Did you mean mlx-community/Qwen3-8B-4bit or Qwen/Qwen3-8B?"),
        ("/etc", "no config.json in it"),
    ],
)
def test_the_command_line_shows_the_error_in_one_line(name, message):
    done = run("generate", "hi", "--model", name)
    assert done.returncode == 1 and not done.stdout
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("shell", "option", "begun", "name"),
    [
        ("bash", "--model", "Qwen/Qwen3-8", "Qwen/Qwen3-8B"),
        ("bash", "--model", "mlx-community/Qwen3-8", "mlx-community/Qwen3-8B-4bit"),
        ("zsh", "--model", "smol", "smollm2"),
        ("fish", "--draft", "z-lab/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("bash", "--draft", "tiny", "tiny-dflash2"),
    ],
)
def test_shells_complete_commands_and_names(shell, option, begun, name):
    words = f"dflash-mlx generate {option} {begun}"
    environment = {
        "_DFLASH_MLX_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": "3",
    }
    environment |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = start(env=os.environ | environment)
    assert name in done.stdout, done.stderr
    if option == "--model":
        assert "DFlash" not in done.stdout, "a drafter is not a model to choose"
