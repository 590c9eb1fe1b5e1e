"""The registry of known pairs: well-formed, without duplicates, found by every target's names."""

import json
from pathlib import Path

import pytest
from families import CONFIGS, CharacterTokenizer, model_of

import dflash_mlx as dm
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.load import load_drafter
from dflash_mlx.loading.registry import hub_gguf, known_drafter, pairs
from dflash_mlx.targets import Target

DATA = Path(__file__).parents[1] / "data"
MISSING = {"step3p7", "glm5_next"}  # of the table; not in this mlx-lm


def test_every_row_is_a_pair_of_repositories_and_none_is_listed_twice():
    drafters = []
    targets = []
    for pair in pairs():
        drafters += [drafter.drafter for drafter in pair.drafters]
        targets += pair.targets
        assert pair.targets
    for name in (*drafters, *targets):
        owner, _, repository = name.partition("/")
        assert owner and repository and "/" not in repository and name == name.strip()
    assert len(drafters) == len(set(drafters)) > 60
    # Targets are looked up by the name without its owner, which therefore must be unique.
    assert len(targets) == len({name.rpartition("/")[2].lower() for name in targets})


def test_the_error_about_a_drafter_that_is_known_not_to_load_says_why():
    """It is raised before a download."""
    with pytest.raises(ConfigError, match="cannot be loaded: its config does not say"):
        load_drafter("Hikari07jp/DSpark-Gemma-4-31B-draft")


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("~/models/Qwen3-8B-bf16/", "z-lab/Qwen3-8B-DFlash-b16"),
        ("tiny", "tiny"),
        ("smollm2", "smollm2"),
        ("mlx-community/Qwen3-8B-4bit-DWQ-053125", "z-lab/Qwen3-8B-DFlash-b16"),
        ("lmstudio-community/Qwen3-Coder-Next-MLX-4bit", "z-lab/Qwen3-Coder-Next-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/gemma-4-31b-it-8bit", "z-lab/gemma-4-31B-it-DFlash"),
        (
            "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
            "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        ),
        ("mlx-community/MiniMax-M2.7-nvfp4", "z-lab/MiniMax-M2.7-DFlash"),
        ("mlx-community/Qwen3.8-27B-4bit", "z-lab/Qwen3.8-27B-DFlash2"),
        ("mlx-community/gemma-4-12B-it-qat-4bit", "z-lab/gemma4-12B-it-DFlash"),
        ("somebody/Qwen3.6-27B-oQ4e", "z-lab/Qwen3.6-27B-DFlash"),
        ("somebody/Qwen3.6-27B-MTPLX-4bit", "z-lab/Qwen3.6-27B-DFlash"),
        ("somebody/Qwen3.6-27B-MTP-MLX-4bit", "z-lab/Qwen3.6-27B-DFlash"),
        ("unsloth/Qwen3.6-35B-A3B-UD-MLX-4bit", "z-lab/Qwen3.6-35B-A3B-DFlash"),
        ("prism-ml/Ternary-Bonsai-27B-mlx-2bit", "Rahim/Ternary-Bonsai-27B-dspark"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"),
        ("mlx-community/SmolLM2-135M-Instruct-4bit", "smollm2"),
    ],
)
def test_a_drafter_is_found_by_the_name_of_a_target_or_its_conversion(name, drafter):
    assert known_drafter(name) == drafter


@pytest.mark.parametrize("name", ["hf.co/x/Qwen3-8B-GGUF:Q4_K_M", "x/qwen3-8b-gguf"])
def test_gguf_files_on_the_hub_are_known_by_their_repository(name, tmp_path, monkeypatch):
    assert known_drafter(name) == "z-lab/Qwen3-8B-DFlash-b16"
    assert hub_gguf(name) == (name.removeprefix("hf.co/").split(":")[0], "Q4_K_M")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)  # a folder here of the same name
    assert hub_gguf(name) is None and hub_gguf("Qwen/Qwen3-8B") is None


@pytest.mark.parametrize("kind", ["", "-Q4_K_M", ".Q8_0", "-UD-Q2_K_XL", "-imat-Q6_K", "-BF16"])
def test_gguf_files_are_known_by_their_name(kind):
    assert known_drafter(f"/models/Qwen3-8B{kind}.gguf") == "z-lab/Qwen3-8B-DFlash-b16"
    assert known_drafter(f"SmolLM2-135M-Instruct{kind}.GGUF") == "smollm2"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Thinking-4bit",
        "x/Qwen3-8B-4bit-lora",
        "x/Qwen3-8B-Base-GGUF",
        "Qwen3-8B-Base-Q4_K_M.gguf",
        "Qwen3-8B-Q4_K_M",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "HuggingFaceTB/SmolLM2-135M",
        "Qwen/Qwen3-8",
        "Qwen3-8B-Base",
        "",
        "/",
    ],
)
def test_another_model_of_a_similar_name_is_not_taken_for_it(name):
    assert known_drafter(name) is None


TINY = json.loads((DATA / "mlx_lm_models.json").read_text()) | {
    config["model_type"]: config for config in CONFIGS.values()
}


@pytest.mark.parametrize("model_type", sorted({pair.model_type for pair in pairs()}))
def test_every_target_of_the_table_can_be_decoded_or_is_marked_as_unsupported(model_type):
    """Its model has the same model_type, and is tiny."""
    pair = next(pair for pair in pairs() if pair.model_type == model_type)
    if pair.unsupported is not None:
        assert model_type in pair.unsupported and model_type in MISSING
        return
    config = TINY[model_type]
    target = Target(
        model_of(config, 0, 0), tokenizer=CharacterTokenizer(), config=config, name=model_type
    )
    session = target.start((0, target.num_layers - 1))
    list(session.prefill([1, 2, 3]))
    _, taps = session.verify(dm.Proposal([4, 5, 6]))
    session.commit([0])
    assert taps.shape == (1, 3, 2 * target.hidden_size)
    assert session.position == 4 and target.supports_trees
