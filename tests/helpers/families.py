"""Tiny random models of every target family, and the text that mlx-lm generates with them."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.drafter.networks import network_for
from dflash_mlx.targets import Target

CONFIGS: dict[str, dict[str, Any]] = {
    row["family"].partition("(")[0]: row["config"]
    for row in json.loads((Path(__file__).parents[1] / "data" / "tiny_configs.json").read_text())
}
FAMILIES = tuple(CONFIGS)
QUANTIZABLE = (  # families with keys and values that can be quantized
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "llama",
    "minimax_m2",
    "glm4_moe",
    "lfm2_moe",
    "nemotron_h",
    "nanbeige",
)
TOKENS = 65  # in a text of `truth`
VARIED = 20  # a text has more different tokens than this
DRAWS = 8  # the number of models that are tried to find such a text
# The lengths of prompts by seed. Windows are 32 rows: the first prompt is longer, and the other
# one's text becomes longer.
PROMPTS = {0: 45, 1: 20}


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random f32 model of a family, its weights scaled so that greedy text is varied.

    `changes` replaces fields of the config (of its text_config, where it has one).
    """
    config = copy.deepcopy(CONFIGS[family])
    config.get("text_config", config).update(changes)
    return model_of(config, seed, 1000 * seed + FAMILIES.index(family))


def model_of(config: dict[str, Any], seed: int, number: int) -> Any:
    """A random f32 model of a config; `number` is the seed of its weights."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # for weights that some layers draw and that are kept below
    model = model_class(args_class.from_dict(config))
    tied = not any("lm_head" in path for path, _ in tree_flatten(model.parameters()))
    key = mx.random.key(number)
    keys = iter(mx.random.split(key, len(tree_flatten(model.parameters()))))

    def randomize(path: str, value: mx.array) -> mx.array:
        noise = mx.random.normal(value.shape, key=next(keys))
        if path.endswith(("A_log", "layer_scalar")) or value.dtype != mx.float32:
            return value  # random values would make no sense
        if value.ndim < 2:  # norms, biases, sinks
            return value + 0.1 * noise
        if "embed" in path:  # small, or greedy text would repeat its last token
            return noise * (0.1 if tied else 0.02)
        if path.endswith(("conv1d.weight", "conv.conv.weight")):
            return noise / math.sqrt(value.shape[1])
        return noise * 1.5 / math.sqrt(value.shape[-1])

    model.update(tree_map_with_path(randomize, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


class CharacterTokenizer:
    """A tokenizer of one printable character per token, with no EOS: texts never end early."""

    bos_token = None
    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False

    @property
    def detokenizer(self) -> Any:
        return CharacterDetokenizer()


class CharacterDetokenizer:
    """The detokenizer of a `CharacterTokenizer`: token 0 is U+4E00, and so on."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = chr(0x4E00 + token)

    def finalize(self) -> None:
        pass


def target_of(model: Any, family: str) -> Target:
    """The `Target` of a random model."""
    return Target(model, CharacterTokenizer(), copy.deepcopy(CONFIGS[family]), name=family)


def family_target(family: str, seed: int = 0, **changes: Any) -> Target:
    """The `Target` of a family's random model."""
    return target_of(random_model(family, seed, **changes), family)


def dspark_for(target: Target) -> DFlash:
    """A random DSpark drafter for a target, with a vocabulary of half of its tokens.

    The kind of Markov head depends on the family, and whether the first row drafts on the kind.
    """
    head = ("vanilla", "gated", "rnn")[FAMILIES.index(target.name) % 3]
    raw = {
        "architectures": ["DSparkDraftModel"],
        "block_size": 6,
        "mask_token_id": 1,
        "target_layer_ids": [0, target.num_layers - 1],
        "markov_rank": 8,
        "markov_head_type": head,
        "sample_from_anchor": head != "gated",
    }
    return _random_drafter(target, raw)


def eagle3_for(target: Target) -> DFlash:
    """A random EAGLE-3 head for a target, with a vocabulary of half of its tokens."""
    taps = [0, 1, target.num_layers - 1]
    config = {"eagle_aux_hidden_state_layer_ids": taps}
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": config}
    return _random_drafter(target, raw)


def _random_drafter(target: Target, raw: dict[str, Any]) -> DFlash:
    sizes = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 2,
    }
    mx.random.seed(5)
    config = DraftConfig.from_dict(sizes | raw)
    drafter = network_for(config)(config)
    drafter.d2t = mx.arange(target.vocab_size // 2)  # every other token
    mx.eval(drafter.parameters(), drafter.d2t)  # because an engine drafts in another thread
    return drafter


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    return [random.Random(seed * 7919 + i).randrange(256) for i in range(length)]


def small_prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt that are in every tiny vocabulary."""
    return [token % 192 for token in random_prompt(length, seed)]


def plain_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """The greedy text of mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in steps]


@functools.cache
def truth(family: str, seed: int) -> tuple[Target, list[int], list[int]]:
    """A random target, a prompt, and mlx-lm's greedy text; shared by all tests.

    Text that repeats a few tokens would test little, so weights are drawn until it is varied.
    """
    prompt = random_prompt(PROMPTS[seed], seed)
    for draw in range(seed, seed + 2 * DRAWS, 2):
        model = random_model(family, draw)
        answer = plain_tokens(model, prompt, TOKENS)
        if len(set(answer)) > VARIED:
            return target_of(model, family), prompt, answer
    raise AssertionError(f"{family}: every text repeats itself; scale its weights in random_model")
