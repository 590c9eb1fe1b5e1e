"""Targets with adapters of mlx_lm.lora and PEFT: the text is mlx-lm's, whatever drafts."""

import functools
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import model_of, plain_tokens, random_prompt
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from mtp_heads import config_of, save_pair
from tinymodels import random_drafter, save_adapter, save_target, save_weights, tokenizer

import dflash_mlx as dm
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.drafter.protocol import drafts_trees
from dflash_mlx.errors import DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.prefix.entries import fingerprint

KINDS = {  # family -> the kind of its adapter
    "qwen3": "dora",
    "qwen3_moe": "lora",
    "qwen3_5": "full",
    "deepseek_v3": "lora",
    "gpt_oss": "lora",
}
HEADS = {"qwen3_5": "mtp", "deepseek_v3": "head"}  # families with an MTP head as the drafter
PROMPTS = [2 * random_prompt(8 + 3 * i, i) for i in range(8)]  # repetitive, so that lookup drafts
LENGTH = 12
SAMPLED = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of a family that returns the folders of its model and of its adapter."""

    @functools.cache
    def save(family: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(family) / "model"
        if family in HEADS:
            save_pair(folder, family)
        else:
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config_of(family)))
            save_weights(folder, model_of(config_of(family), 1, 77))
            tokenizer().save_pretrained(folder)
        return folder, save_adapter(folder.parent / "adapter", folder, KINDS[family])

    return save


@pytest.mark.parametrize("family", KINDS)
def test_text_with_an_adapter_is_mlx_lms(saved: Any, family: str) -> None:
    """In chains and trees, alone, with kept caches and nine at once, greedy and sampled."""
    folder, adapter = saved(family)
    reference, _ = load_model(folder)
    reference.set_dtype(mx.float32)
    plain = plain_tokens(reference, PROMPTS[0], LENGTH)
    load_adapters(reference, str(adapter))
    reference.eval()
    tuned = [plain_tokens(reference, prompt, LENGTH) for prompt in PROMPTS[:4]]
    tuned = [text[: text.index(0) + 1] if 0 in text else text for text in tuned]  # 0 ends a text
    assert tuned[0] != plain
    draft_name = HEADS.get(family, "none").replace("head", str(folder / "head"))
    target, head = dm.load(str(folder), draft_name, adapter=str(adapter))
    greedy = {"max_tokens": LENGTH}
    requests = [(prompt, greedy) for prompt in PROMPTS[:4]]
    requests += [(prompt, greedy | SAMPLED) for prompt in PROMPTS[4:]]
    next_turn = PROMPTS[0] + tuned[0] + PROMPTS[1]
    requests.append((next_turn, greedy))
    texts = list(tuned)
    for prompt, settings in requests[4:]:
        texts.append(dm.generate(target, None, prompt, **settings).tokens)
    network = random_drafter(vocab_size=256, num_target_layers=4, target_layer_ids=[0, 3])
    for drafter in filter(None, (network, LookupDrafter(), head)):
        has_trees = drafts_trees(drafter) and target.supports_trees
        for rows in (None, 8) if has_trees else (None,):
            drafts = {"block_size": 6, "tree_budget": rows}
            store = dm.PrefixStore(target, drafter, memory=2**24, chunk=8)
            keeps = ({}, {"prefix": store}, {"conversation": dm.Conversation(target, drafter)})
            # The first request twice, its next turn, and a sampled one twice.
            for kept, number in product(keeps, (0, 0, 8, 4, 4)):
                prompt, settings = requests[number]
                alone = dm.generate(target, drafter, prompt, **settings, **drafts, **kept)
                assert alone.tokens == texts[number]
                if not isinstance(drafter, LookupDrafter):
                    assert alone.stats.drafted_tokens > 0
            with dm.Engine(target, drafter) as engine:
                jobs = [engine.submit(prompt, **way, **drafts) for prompt, way in requests]
                assert [job.result().tokens for job in jobs] == texts


def test_stored_prefixes_are_not_shared_between_adapters(saved: Any, tmp_path: Path) -> None:
    folder, adapter = saved("qwen3")
    target = dm.load_target(str(folder), adapter=str(adapter))
    base = dm.load_target(str(folder))
    prompt = random_prompt(60, 3)
    tuned = dm.generate(target, None, prompt, max_tokens=12).tokens
    plain = dm.generate(base, None, prompt, max_tokens=12).tokens
    assert tuned != plain
    for model, text in ((base, plain), (target, tuned), (target, tuned)):
        store = dm.PrefixStore(model, None, folder=tmp_path, memory=2**20, chunk=16, disk_left=0)
        assert dm.generate(model, None, prompt, max_tokens=12, prefix=store).tokens == text
        store.flush()
    other = save_adapter(tmp_path / "other", folder, "dora", scale=5.0)  # the same tensors
    targets = (base, target, dm.load_target(str(folder), adapter=str(other)))
    assert len({fingerprint(model, None) for model in targets}) == 3


def test_adapters_that_do_not_fit_or_are_incomplete_are_refused(saved: Any, tmp_path: Path) -> None:
    folder, adapter = saved("qwen3")
    _, other = saved("qwen3_moe")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(adapter, tmp_path / name))

    config = json.loads((adapter / "adapter_config.json").read_text())
    wrong_rank = copy("wrong_rank")
    changed = config | {"lora_parameters": config["lora_parameters"] | {"rank": 8}}
    (wrong_rank / "adapter_config.json").write_text(json.dumps(changed))
    truncated = copy("truncated")
    whole = (truncated / "adapters.safetensors").read_bytes()
    (truncated / "adapters.safetensors").write_bytes(whole[:-100])
    incomplete = copy("incomplete")
    weights = dict(mx.load(str(incomplete / "adapters.safetensors")))
    mx.eval(weights)
    weights.pop(next(iter(weights)))
    mx.save_safetensors(str(incomplete / "adapters.safetensors"), weights)
    unknown_type = copy("unknown_type")
    ia3 = config | {"fine_tune_type": "ia3"}
    (unknown_type / "adapter_config.json").write_text(json.dumps(ia3))
    without_weights = copy("without_weights")
    (without_weights / "adapters.safetensors").unlink()
    for path, message in (
        (other, "does not fit"),
        (wrong_rank, "does not fit .*incompatible tensors"),
        (incomplete, "does not fit .* is missing"),
        (truncated, "truncated"),
        (unknown_type, "fine_tune_type is 'ia3'"),
        (without_weights, "there is no adapters.safetensors in it"),
        (tmp_path / "nowhere", "no such folder"),
    ):
        with pytest.raises(DFlashError, match=message) as caught:
            dm.load_target(str(folder), adapter=str(path))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_missing_adapter_is_an_error_before_a_model_is_downloaded() -> None:
    unreachable = Hub("http://127.0.0.1:1")
    with pytest.raises(DFlashError, match="No adapter './nowhere'"):
        dm.load("no-such/model", "none", adapter="./nowhere", hub=unreachable)


# PEFT's adapters are compared with the same update added to the model's weights.

PEFT: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
PROJECTIONS = {"self_attn.q_proj": (128, 64), "mlp.down_proj": (64, 128)}


def peft_folder(path: Path, more: dict[str, Any], prefix: str = "model.") -> Path:
    """A random adapter of two projections in two layers, as PEFT writes it."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(PEFT | more))
    ranks = {name: 4 for name in PROJECTIONS} | more.get("rank_pattern", {})
    mx.random.seed(3)
    weights = {}
    for layer in (0, 2):
        for name, (out, size) in PROJECTIONS.items():
            stem = f"base_model.model.{prefix}layers.{layer}.{name}."
            weights[f"{stem}lora_A.weight"] = mx.random.normal((ranks[name], size))
            weights[f"{stem}lora_B.weight"] = 0.1 * mx.random.normal((out, ranks[name]))
            if more.get("use_dora"):
                weights[f"{stem}lora_magnitude_vector"] = 1 + mx.random.uniform(shape=(out,))
    mx.save_safetensors(str(path / "adapter_model.safetensors"), weights)
    return path


def merged(folder: Path, adapter: Path, more: dict[str, Any]) -> dict[str, mx.array]:
    """The model's weights with the update: W + scale * B @ A.

    In DoRA each row of the sum is then scaled to the adapter's magnitude.
    """
    weights = dict(mx.load(str(folder / "model.safetensors")))
    update = dict(mx.load(str(adapter / "adapter_model.safetensors")))
    for name in [name for name in update if name.endswith("lora_A.weight")]:
        a = update[name]
        b = update[name.replace("lora_A", "lora_B")]
        path = name.removeprefix("base_model.model.").replace(".lora_A", "")
        path = path if path in weights else f"model.{path}"
        projection = path.removesuffix(".weight").partition("layers.")[2].partition(".")[2]
        alpha = more.get("alpha_pattern", {}).get(projection, 8)
        rank = a.shape[0]
        scale = alpha / (rank**0.5 if more.get("use_rslora") else rank)
        weights[path] = weights[path] + scale * b @ a
        if more.get("use_dora"):
            size = update[name.replace("lora_A.weight", "lora_magnitude_vector")]
            norm = mx.linalg.norm(weights[path], axis=1)
            weights[path] = weights[path] * (size / norm)[:, None]
    return weights


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"mlp.down_proj": 2}, "alpha_pattern": {"mlp.down_proj": 32}},
    ],
    ids=["LoRA", "rsLoRA", "DoRA", "patterns"],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_an_adapter_of_peft_is_added_to_the_weights(
    tmp_path: Path, more: dict[str, Any], prefix: str
) -> None:
    folder = save_target(tmp_path / "model", "llama")
    adapter = peft_folder(tmp_path / "adapter", more, prefix)
    tokens = mx.array([[1, 2, 3, 4, 5]])
    tuned = dm.load_target(str(folder), adapter=str(adapter)).model(tokens)
    plain = dm.load_target(str(folder)).model(tokens)
    mx.save_safetensors(str(folder / "model.safetensors"), merged(folder, adapter, more))
    expected = dm.load_target(str(folder)).model(tokens)
    assert mx.abs(expected - plain).max() > 0.1
    assert mx.allclose(tuned, expected, atol=1e-3, rtol=1e-3)


def test_a_module_that_peft_saved_whole_replaces_the_models(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "model", "llama", tie_word_embeddings=False)
    adapter = peft_folder(tmp_path / "adapter", {"modules_to_save": ["lm_head"]})
    file = str(adapter / "adapter_model.safetensors")
    head = 2 * mx.load(str(folder / "model.safetensors"))["lm_head.weight"]
    weights = dict(mx.load(file)) | {"base_model.model.lm_head.weight": head}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    model = dm.load_target(str(folder), adapter=str(adapter)).model
    assert mx.array_equal(model.lm_head.weight, head)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_an_adapter_of_peft_that_is_more_than_lora_is_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    folder = save_target(tmp_path / "model", "llama")
    adapter = peft_folder(tmp_path / "adapter", more)
    with pytest.raises(DFlashError, match=message):
        dm.load_target(str(folder), adapter=str(adapter))


def test_an_adapter_of_peft_for_another_model_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "model", "llama")
    adapter = peft_folder(tmp_path / "adapter", {})
    file = str(adapter / "adapter_model.safetensors")
    weights = dict(mx.load(file))
    mx.eval(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed, message in (
        (weights | {name.replace("layers.0", "layers.9"): weights[name]}, "has no place in it"),
        (weights | {name: mx.zeros((4, 32))}, r"lora_a is \(32, 4\) and not \(64, 4\)"),
        ({key: x for key, x in weights.items() if key != name}, "has no lora_a"),
    ):
        mx.save_safetensors(file, changed)
        with pytest.raises(DFlashError, match=message):
            dm.load_target(str(folder), adapter=str(adapter))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(DFlashError, match="a PEFT adapter, and there is no adapter_model"):
        dm.load_target(str(folder), adapter=str(adapter))
