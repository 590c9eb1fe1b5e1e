"""MTP heads: how they are read from checkpoints, and their drafts against a numpy oracle's."""

import json
import random
from pathlib import Path

import mlx.core as mx
import mtp_oracle
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mtp_heads import HEADS, config_of, head_weights, save_pair, shapes_of
from pairs import mtp as pair
from tinymodels import greedy

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.mtp import LAYOUTS
from dflash_mlx.errors import ConfigError, SettingsError, WeightsError
from dflash_mlx.loading.drafter_fields import inspect_drafter
from dflash_mlx.loading.drafter_loader import DraftSource
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load
from dflash_mlx.loop import generate
from dflash_mlx.sampling import Sampler

PROMPT = [5, 9, 2, 40, 41, 7, 100, 3]
WITH_ORACLE = [family for family in HEADS if family != "nemotron_h"]


def oracle_of(family: str) -> mtp_oracle.Head:
    target, _ = pair(family)
    config = config_of(family)
    config = config.get("text_config", config)
    prefix = LAYOUTS[family].prefix.format(N=config["num_hidden_layers"])
    embed = np.array(target.embed(mx.arange(target.vocab_size)[None])[0])
    lm_head = np.array(target.head(mx.eye(target.hidden_size)[None])[0]).T
    return mtp_oracle.Head(family, prefix, head_weights(family), config, embed, lm_head)


class DraftSteps:
    """Drafts for a text that grows by a random number of the drafted tokens at each step."""

    def __init__(self, family: str) -> None:
        target, drafter = pair(family)
        self.target = target
        self.norm = target.parts.norm
        self.draws = random.Random(0)
        self.session = drafter.start(target, Sampler())
        self.target_session = target.start(drafter.tap_layers)
        self.drafter = drafter
        self.text = list(PROMPT)
        self.drafted_at = 0  # the length of the text at the last draft
        self.features: list[np.ndarray] = []  # of the tokens since then

    def propose(self, width: int) -> tuple[list[int], np.ndarray, list[int]]:
        """Our drafts; the features since the last draft, and the token after each of them."""
        position = self.target_session.position
        text = self.text
        for _, taps in self.target_session.prefill(text[position:]):
            tokens = text[position : position + taps.shape[1]]
            self.session.extend(taps, tokens=tokens)
            self.features.append(np.array(self.norm(taps)[0]))
            position += len(tokens)
        anchor = self.draws.randrange(200)
        drafts = self.session.propose(anchor, width).tokens
        drafts = drafts if isinstance(drafts, list) else drafts.tolist()
        features = np.concatenate(self.features)
        next_tokens = [*text, anchor][self.drafted_at + 1 :]
        if width > 1:
            self.features = []
            self.drafted_at = len(text)
        self.text += drafts[: self.draws.randint(1, width)]
        return drafts[1:], features, next_tokens


@pytest.mark.parametrize("family", WITH_ORACLE)
def test_drafts_and_logits_are_the_oracles(family, monkeypatch) -> None:
    """Over steps of different widths, one of them a plain step, of which some rows are rejected."""
    steps = DraftSteps(family)
    oracle = oracle_of(family)
    logits_of_draft: list[np.ndarray] = []
    original_logits = type(steps.drafter).logits

    def logits(head, hidden, target):
        result = original_logits(head, hidden, target)
        logits_of_draft.append(np.array(result[0]))
        return result

    monkeypatch.setattr(type(steps.drafter), "logits", logits)
    for width in (5, 2, 1, 4, 5):
        logits_of_draft.clear()
        drafts, features, next_tokens = steps.propose(width)
        if width > 1:
            expected = oracle.draft(features, next_tokens, width - 1)
            assert np.abs(np.concatenate(logits_of_draft) - expected).max() < 1e-4
            assert drafts == expected.argmax(-1).tolist()


def test_a_target_with_an_mtp_head_drafts_with_it(tmp_path) -> None:
    folder, _ = save_pair(tmp_path, "glm4_moe")
    target, drafter = load(str(folder))
    assert drafter.label == "MTP+lookup"
    assert 0 < drafter.slot_cost(target) < 1
    decisions = inspect_drafter(folder)
    assert decisions[-1].value == f"{len(head_weights('glm4_moe'))} tensors"
    _, quantized_head = load(str(folder), draft="mtp", draft_bits=4)
    assert "scales" in quantized_head.layers[0].self_attn.q_proj
    with pytest.raises(SettingsError, match="draft_window means nothing to mtp"):
        load(str(folder), draft="mtp", draft_window=4)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_head_of_quantized_weights_is_loaded_without_quantizing_again(mode, tmp_path) -> None:
    folder, _ = save_pair(tmp_path, "glm4_moe")
    file = folder / "model.safetensors"
    stored = dict(mx.load(str(file)))
    name = next(name for name in stored if name.endswith("eh_proj.weight"))
    parts = mx.quantize(stored.pop(name), group_size=32, bits=4, mode=mode)
    names = (name.replace("weight", part) for part in ("weight", "scales", "biases"))
    stored = {key: mx.array(value) for key, value in stored.items()}  # read before overwriting
    stored |= dict(zip(names, parts, strict=False))
    mx.save_safetensors(str(file), stored)
    _, head = load(str(folder), draft="mtp")
    expected = mx.dequantize(*parts, group_size=32, bits=4, mode=mode)
    assert mx.allclose(head.fc.weight, expected, rtol=1e-2)  # a CPU computes with floats
    with pytest.raises(SettingsError, match="quantized already"):
        load(str(folder), draft="mtp", draft_bits=4)
    if mode == "affine":
        del stored[name.replace("weight", "biases")]
        mx.save_safetensors(str(file), stored)
        with pytest.raises(WeightsError, match=r"eh_proj\.biases is missing"):
            load(str(folder), draft="mtp")


@pytest.mark.parametrize(
    ("family", "mode"), [("qwen3_5", None), ("qwen3_5_moe", "affine"), ("qwen3_5", "mxfp4")]
)
def test_a_head_that_mlx_vlm_split_off_loads_with_the_same_weights(family, mode, tmp_path) -> None:
    """Its tensors' names lack "mtp.", and its norms are stored as MLX computes them.

    The norms are small here, so that their mean does not tell in which form they are stored.
    """
    folder, _ = save_pair(tmp_path / "pair", family)
    _, head = load(str(folder), draft="mtp")
    published_prefixes = {ours: published for published, ours in LAYOUTS[family].names.items()}

    def published_name(name: str) -> str:
        prefix = next(prefix for prefix in published_prefixes if name.startswith(prefix))
        return published_prefixes[prefix] + name.removeprefix(prefix)

    expected = {}
    stored = {}
    for our_name, weight in tree_flatten(head.parameters()):
        name = published_name(our_name)
        expected[name] = weight * 0.1 if weight.ndim == 1 else weight
        parts = [expected[name]]
        if mode is not None and weight.ndim > 1 and "shared_expert_gate" not in name:
            parts = mx.quantize(weight, group_size=32, bits=4, mode=mode)
            expected[name] = mx.dequantize(*parts, group_size=32, bits=4, mode=mode)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            stored[name.removesuffix("weight") + part] = array
    split = tmp_path / "split"
    split.mkdir()
    mx.save_safetensors(str(split / "model.safetensors"), stored, metadata={"format": "mlx"})
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": config_of(family)}
    (split / "config.json").write_text(json.dumps(config))
    assert inspect_drafter(split)[0].value == "an MTP head"
    source = DraftSource.of("split", Folder(split), config_of(family))
    assert len(source.tensors) == len(stored)  # the check of free memory counts these
    target, drafter = load(str(folder), draft=str(split))
    for name, value in tree_flatten(drafter.parameters()):
        assert mx.allclose(value, expected[published_name(name)], rtol=1e-2, atol=1e-6), name
    assert generate(target, drafter, PROMPT, max_tokens=9).tokens == greedy(target, PROMPT, 9)


@pytest.mark.parametrize("family", HEADS)
def test_the_error_of_an_incomplete_head_names_the_missing_tensor(family, tmp_path) -> None:
    folder, draft = save_pair(tmp_path, family)
    head = {name: mx.array(value) for name, value in head_weights(family).items()}
    missing = next(  # the norm of embeddings, by its names in the families
        name
        for name in head
        if name.endswith(("norm_embedding.weight", "enorm.weight")) or "token_layernorm" in name
    )
    file = Path(draft) / "mtp.safetensors" if draft != "mtp" else folder / "model.safetensors"
    stored = dict(mx.load(str(file)))
    del stored[missing]
    mx.save_safetensors(str(file), stored)
    with pytest.raises(WeightsError, match=f"of its MTP head, the tensor {missing} is missing"):
        load(str(folder), draft=draft)


def test_a_checkpoint_without_an_mtp_head_is_refused(tmp_path) -> None:
    """Where quantizing dropped the tensors, and where the model type has no head that we read."""
    folder, _ = save_pair(tmp_path, "glm4_moe")
    stored = dict(mx.load(str(folder / "model.safetensors")))
    for name in shapes_of("glm4_moe"):
        del stored[name]
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    with pytest.raises(WeightsError, match=r"no tensor model\.layers\.4\.\*.*the original"):
        load(str(folder), draft="mtp")
    (folder / "config.json").write_text(json.dumps(config_of("glm4_moe") | {"model_type": "llama"}))
    with pytest.raises(WeightsError, match="MTP heads of llama cannot be read, only those of"):
        load(str(folder), draft="mtp")


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ({"architectures": ["Qwen3_5MTP"]}, "an MTP head, which drafts for the one target"),
        ({"model_type": "qwen3_5_mtp"}, "an MTP head"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "an EAGLE-3 head of another network"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE head of version 1 or 2"),
        ({"speculators_model_type": "peagle"}, "a P-EAGLE head"),
    ],
)
def test_the_error_for_a_config_of_another_head_names_its_kind(labels, what) -> None:
    with pytest.raises(ConfigError, match=what):
        DraftConfig.from_dict({"hidden_size": 64, **labels})
