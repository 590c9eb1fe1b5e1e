"""What a drafter's tensors decide: names of every packaging, copies that are dropped, bad ids."""

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


def tensors(drafter, rename=lambda name: name):
    return {rename(name): value for name, value in tree_flatten(drafter.parameters())}


def decided(folder):
    return {item.field: (item.value, item.source) for item in inspect_drafter(folder)}


def test_early_specforge_files_prefix_their_heads(tmp_path):
    """Confidence heads are not read."""
    config = raw_config(enable_confidence_head=True)
    drafter = build(config, ())
    stored = tensors(drafter, lambda name: name.replace("markov_head", "logit_head.markov_head"))
    stored["logit_head.confidence_head.proj.weight"] = mx.zeros((1, 40))
    loaded = tensors(read_drafter(Folder(save(tmp_path, config, stored))))
    assert loaded.keys() == tensors(drafter).keys()


def test_inspecting_shows_masks_and_unused_keys(tmp_path):
    config = raw_config(num_anchors=512)
    save(tmp_path, config, tensors(build(config, (MASK,))))
    said = decided(tmp_path)
    assert said["network"] == ("DSpark", "architectures")
    assert said["masks"] == ("its own embedding", f"tensor {MASK}")
    assert said["num_anchors"][0] == 512
    assert said["first_row"] == (0, "default of specforge")


@pytest.mark.parametrize("offsets", [[0, -1, 0], [0, 0, 10**6], [-5, 0, 0]], ids=str)
def test_ids_that_are_no_tokens_are_refused(tmp_path, offsets):
    config = raw_config(draft_vocab_size=3)
    stored = tensors(build(raw_config(draft_vocab_size=23)))
    for name, value in stored.items():
        if name.endswith(("lm_head.weight", "markov_w2.weight")) or name == "d2t":
            stored[name] = value[:3]
    stored["d2t"] = mx.array(offsets)
    with pytest.raises(WeightsError, match="d2t does not name 3 different tokens"):
        read_drafter(Folder(save(tmp_path, config, stored)))


def test_a_reduced_vocabulary_needs_a_head_of_its_own(tmp_path):
    config = raw_config(draft_vocab_size=23)
    stored = tensors(build(config))
    del stored["lm_head.weight"]
    with pytest.raises(WeightsError, match="lm_head.weight is missing"):
        read_drafter(Folder(save(tmp_path, config, stored)))


def test_weights_of_another_quantization_are_refused_by_name(tmp_path):
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
    drafter.lm_head.weight = model.model.lm_head.weight * 1.0
    before = drafter.logits(mx.ones((1, 2, 64)), model)
    assert drop_copies(drafter, model) == ["head"]
    assert mx.allclose(drafter.logits(mx.ones((1, 2, 64)), model), before, atol=1e-4)
    assert {"embed_tokens", "lm_head"}.isdisjoint(drafter)


def test_a_head_that_differs_in_one_token_stays():
    model = target()
    drafter = build(raw_config(**FIT), (HEAD,))
    weight = model.model.lm_head.weight * 1.0
    weight[17] = 0.0
    drafter.lm_head.weight = weight
    assert drop_copies(drafter, model) == []


def test_a_depth_that_is_one_off_warns_and_more_is_an_error():
    model = target()
    drafter = build(raw_config(**FIT | {"num_target_layers": 4}))
    with pytest.warns(UserWarning, match="num_target_layers is 4, this target has 3"):
        drafter.start(model)
    other = build(raw_config(**FIT | {"num_target_layers": 5}))
    with pytest.raises(IncompatibleDrafterError, match="num_target_layers is 5"):
        other.start(model)
