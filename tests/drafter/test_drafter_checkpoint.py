"""A drafter's checkpoint: names of tensors, checks, and copies of the target's that are dropped."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from test_dspark import build, raw_config
from tinymodels import target

from dflash_mlx.drafter.networks import EMBEDDING, HEAD, MASK
from dflash_mlx.errors import ConfigError, IncompatibleDrafterError, WeightsError
from dflash_mlx.loading.drafter_fields import inspect_drafter
from dflash_mlx.loading.drafter_loader import drop_copies, read_drafter
from dflash_mlx.loading.folder import Folder

VOCABULARY = target().vocab_size
FIT = {
    "target_layer_ids": [0, 2],
    "hidden_size": 64,
    "vocab_size": VOCABULARY,
    "num_target_layers": 3,
    "head_dim": 16,
}


def save(folder, config, weights):
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def tensors(drafter):
    return dict(tree_flatten(drafter.parameters()))


def decisions(folder):
    """What inspecting a drafter's folder says: (value, source) by field."""
    return {item.field: (item.value, item.source) for item in inspect_drafter(folder)}


def test_heads_of_early_specforge_files_are_read_without_their_prefix(tmp_path):
    """Their confidence heads are ignored."""
    config = raw_config(enable_confidence_head=True)
    drafter = build(config, ())
    stored = {
        name.replace("markov_head", "logit_head.markov_head"): value
        for name, value in tensors(drafter).items()
    }
    stored["logit_head.confidence_head.proj.weight"] = mx.zeros((1, 40))
    loaded = tensors(read_drafter(Folder(save(tmp_path, config, stored))))
    assert loaded.keys() == tensors(drafter).keys()


def test_inspecting_shows_masks_and_unused_keys(tmp_path):
    config = raw_config(num_anchors=512)
    save(tmp_path, config, tensors(build(config, (MASK,))))
    inspected = decisions(tmp_path)
    assert inspected["network"] == ("DSpark", "architectures")
    assert inspected["masks"] == ("its own embedding", f"tensor {MASK}")
    assert inspected["num_anchors"][0] == 512
    assert inspected["first_row"] == (0, "default of specforge")


@pytest.mark.parametrize("offsets", [[0, -1, 0], [0, 0, 10**6], [-5, 0, 0]], ids=str)
def test_a_reduced_vocabulary_with_invalid_token_ids_is_refused(tmp_path, offsets):
    """Tensor d2t holds the offset of each draft id to the target's: no duplicate, none outside."""
    config = raw_config(draft_vocab_size=3)
    stored = tensors(build(raw_config(draft_vocab_size=23)))
    for name, value in stored.items():
        if name.endswith(("lm_head.weight", "markov_w2.weight")) or name == "d2t":
            stored[name] = value[:3]
    stored["d2t"] = mx.array(offsets)
    with pytest.raises(WeightsError, match="d2t does not name 3 different tokens"):
        read_drafter(Folder(save(tmp_path, config, stored)))


def test_a_reduced_vocabulary_without_a_head_in_the_checkpoint_is_refused(tmp_path):
    config = raw_config(draft_vocab_size=23)
    stored = tensors(build(config))
    del stored["lm_head.weight"]
    with pytest.raises(WeightsError, match="lm_head.weight is missing"):
        read_drafter(Folder(save(tmp_path, config, stored)))


def test_an_unsupported_quantization_is_an_error_only_if_the_weights_have_it(tmp_path):
    """Plain weights load with a warning that the config says something else."""
    config = raw_config(quantization_config={"quant_algo": "NVFP4"})
    stored = tensors(build(raw_config()))
    save(tmp_path, config, stored)
    with pytest.warns(UserWarning, match="quantization \\('NVFP4'\\), but the weights are plain"):
        read_drafter(Folder(tmp_path))

    name = next(name for name in stored if name.endswith("q_proj.weight"))
    save(tmp_path, config, stored | {name: stored[name].astype(mx.uint8)})
    with pytest.raises(ConfigError, match="quantization_config {'quant_algo': 'NVFP4'}"):
        read_drafter(Folder(tmp_path))


def test_copies_of_the_targets_embedding_and_head_are_dropped():
    model = target()
    config = raw_config(**FIT)
    drafter = build(config, (EMBEDDING, HEAD))
    assert drop_copies(drafter, model) == [], "they differ from the target's"
    drafter.embed_tokens.weight = model.embed(mx.arange(VOCABULARY)[None])[0]
    assert drop_copies(drafter, model) == ["embedding"]
    drafter.lm_head.weight = model.model.lm_head.weight * 1.0  # a copy
    before = drafter.logits(mx.ones((1, 2, 64)), model)
    assert drop_copies(drafter, model) == ["head"]
    assert mx.allclose(drafter.logits(mx.ones((1, 2, 64)), model), before, atol=1e-4)
    assert {"embed_tokens", "lm_head"}.isdisjoint(drafter)


def test_a_head_that_differs_in_one_token_stays():
    model = target()
    drafter = build(raw_config(**FIT), (HEAD,))
    weight = model.model.lm_head.weight * 1.0  # a copy
    weight[17] = 0.0
    drafter.lm_head.weight = weight
    assert drop_copies(drafter, model) == []


def test_a_target_with_one_layer_less_warns_and_with_two_is_refused():
    """Some published files are off by one."""
    model = target()
    drafter = build(raw_config(**FIT | {"num_target_layers": 4}))
    with pytest.warns(UserWarning, match="num_target_layers is 4, this target has 3"):
        drafter.start(model)
    two_off = build(raw_config(**FIT | {"num_target_layers": 5}))
    with pytest.raises(IncompatibleDrafterError, match="num_target_layers is 5"):
        two_off.start(model)
