"""Targets with an adapter of mlx_lm.lora: mlx-lm's own text with it, whatever drafts."""

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
from tinymodels import random_drafter, save_adapter, save_weights, tokenizer

import dflash_mlx as dm
from dflash_mlx.drafter.lookup import LookupDrafter
from dflash_mlx.drafter.protocol import drafts_trees
from dflash_mlx.errors import DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.prefix.blocks import fingerprint

KINDS = {"qwen3": "dora", "qwen3_moe": "lora", "qwen3_5": "full", "deepseek_v3": "lora"}
KINDS |= {"gpt_oss": "lora"}
HEADS = {"qwen3_5": "mtp", "deepseek_v3": "head"}
PROMPTS = [2 * random_prompt(8 + 3 * i, i) for i in range(8)]  # a lookup finds something
LENGTH = 12
SAMPLED = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> the folder of its model and of its adapter."""

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
def test_text_is_mlx_lms_own_with_the_adapter(saved: Any, family: str) -> None:
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
    named = HEADS.get(family, "none").replace("head", str(folder / "head"))
    target, head = dm.load(str(folder), named, adapter=str(adapter))
    ways = [(prompt, {"max_tokens": LENGTH}) for prompt in PROMPTS[:4]]
    ways += [(prompt, {"max_tokens": LENGTH} | SAMPLED) for prompt in PROMPTS[4:]]
    ways += [(PROMPTS[0] + tuned[0] + PROMPTS[1], {"max_tokens": LENGTH})]  # a next turn
    texts = tuned + [dm.generate(target, None, prompt, **way).tokens for prompt, way in ways[4:]]
    network = random_drafter(vocab_size=256, num_target_layers=4, target_layer_ids=[0, 3])
    for drafter in filter(None, (network, LookupDrafter(), head)):
        for rows in (None, 8) if drafts_trees(drafter) and target.supports_trees else (None,):
            drafts = {"block_size": 6, "tree_budget": rows}
            store = dm.PrefixStore(target, drafter, memory=2**24, chunk=8)
            keeps = {}, {"prefix": store}, {"conversation": dm.Conversation(target, drafter)}
            for kept, one in product(keeps, (0, 0, 8, 4, 4)):
                prompt, way = ways[one]
                alone = dm.generate(target, drafter, prompt, **way, **drafts, **kept)
                assert alone.tokens == texts[one]
                assert alone.stats.drafted_tokens > 0 or isinstance(drafter, LookupDrafter)
            with dm.Engine(target, drafter) as engine:
                jobs = [engine.submit(prompt, **way, **drafts) for prompt, way in ways]
                assert [job.result().tokens for job in jobs] == texts


def test_prefixes_on_the_disk_know_the_adapter(saved: Any, tmp_path: Path) -> None:
    folder, adapter = saved("qwen3")
    target = dm.load_target(str(folder), adapter=str(adapter))
    base = dm.load_target(str(folder))
    prompt = random_prompt(60, 3)
    tuned, plain = (dm.generate(one, None, prompt, max_tokens=12).tokens for one in (target, base))
    assert tuned != plain
    for one, text in ((base, plain), (target, tuned), (target, tuned)):
        store = dm.PrefixStore(one, None, folder=tmp_path, memory=2**20, chunk=16, disk_left=0)
        assert dm.generate(one, None, prompt, max_tokens=12, prefix=store).tokens == text
        store.flush()
    other = save_adapter(tmp_path / "other", folder, "dora", scale=5.0)
    targets = (base, target, dm.load_target(str(folder), adapter=str(other)))
    assert len({fingerprint(one, None) for one in targets}) == 3  # of the same tensors, scaled


def test_adapters_that_do_not_fit(saved: Any, tmp_path: Path) -> None:
    folder, adapter = saved("qwen3")
    _, other = saved("qwen3_moe")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(adapter, tmp_path / name))

    config = json.loads((adapter / "adapter_config.json").read_text())
    ranks, cut, part, kind, empty = map(copy, ("ranks", "cut", "part", "kind", "empty"))
    changed = config | {"lora_parameters": config["lora_parameters"] | {"rank": 8}}
    (ranks / "adapter_config.json").write_text(json.dumps(changed))
    whole = (cut / "adapters.safetensors").read_bytes()
    (cut / "adapters.safetensors").write_bytes(whole[:-100])
    weights = dict(mx.load(str(part / "adapters.safetensors")))
    mx.eval(weights)
    weights.pop(next(iter(weights)))
    mx.save_safetensors(str(part / "adapters.safetensors"), weights)
    (kind / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": "ia3"}))
    (empty / "adapters.safetensors").unlink()
    for path, said in (
        (other, "does not fit"),
        (ranks, "does not fit .* does not match"),
        (part, "does not fit .* is missing"),
        (cut, "truncated"),
        (kind, "fine_tune_type is 'ia3'"),
        (empty, "there is no adapters.safetensors"),
        (tmp_path / "nowhere", "no such folder"),
    ):
        with pytest.raises(DFlashError, match=said) as caught:
            dm.load_target(str(folder), adapter=str(path))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_an_adapter_that_is_not_there_is_missed_before_a_model_is_downloaded() -> None:
    nowhere = Hub("http://127.0.0.1:1")
    with pytest.raises(DFlashError, match="No adapter './nowhere'"):
        dm.load("no-such/model", "none", adapter="./nowhere", hub=nowhere)
