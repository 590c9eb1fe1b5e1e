"""Small random models with real tokenizers and files, which load and run quickly."""

import functools
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CONFIGS
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.drafter.networks import network_for
from dflash_mlx.loading.load import load_target
from dflash_mlx.targets import Target

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LINES = [
    "The quick brown fox jumps over the lazy dog, 1234567890 times; isn't that a lot?",
    "user: what is 37 + 48? assistant: It is 85. Thanks! (You're welcome.)",
    "naïve café, façade, jalapeño: 10 € each, smörgåsbord 中文 also 🙂🚀🙂",
    'def area(width, height):\n    return width * height  # "units" differ\n',
]
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 32,
}
# Fields of a config that differ from those in families.py, besides SHAPE.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {},
    "sliding llama": {"tie_word_embeddings": True} | WINDOWS,
    "gpt_oss": WINDOWS,
    "qwen3_next": {},
}
SUPPORTED = ["qwen3", "llama", "qwen3_moe"]
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_target_layers": 3,
    "block_size": 16,
    "mask_token_id": 1,
    "target_layer_ids": [0, 2],
}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer like Qwen's, trained on a few lines."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        LINES * 2, trainers.BpeTrainer(vocab_size=192, special_tokens=[END], show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def wrapped(eos_ids: Iterable[int] = ()) -> TokenizerWrapper:
    """The tokenizer in mlx-lm's wrapper, with further end-of-sequence tokens."""
    return TokenizerWrapper(tokenizer(), BPEStreamingDetokenizer, eos_token_ids=list(eos_ids))


def model_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model of a family."""
    config = CONFIGS[family.split()[-1]] | {"rope_scaling": None} | SHAPE | FAMILIES[family]
    return config | {"vocab_size": len(tokenizer())} | overrides


def random_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """An mlx-lm model with varied greedy text, which has no end-of-sequence token."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # With the usual small weights, the text would repeat one token.
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters()))
    for name, part in model.named_modules():
        if name.endswith("lm_head") or (name.endswith("embed_tokens") and "lm_head" not in model):
            part.weight[tokenizer().eos_token_id] = 0.0  # its logit is 0, never the largest
    mx.eval(model.parameters())
    return model


@functools.cache
def target(family: str = "qwen3", bits: int | None = None, **config: Any) -> Target:
    """A tiny target, loaded from a folder as users do it.

    Tests share it, so no test may change it.
    """
    with tempfile.TemporaryDirectory() as folder:
        return load_target(str(save_target(Path(folder), family, **config)), bits=bits)


def ending_at(target: Target, *eos_ids: int) -> Target:
    """A target of the same model with further end-of-sequence tokens."""
    config = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config["max_position_embeddings"] = target.context_length
    return Target(target.model, tokenizer=wrapped(eos_ids), config=config, name=target.name)


def drafter_config(**overrides: Any) -> dict[str, Any]:
    """A drafter's config.json that fits the tiny targets."""
    return DRAFTER | {"vocab_size": len(tokenizer())} | overrides


def random_drafter(seed: int = 0, **overrides: Any) -> DFlash:
    """A DFlash or DFlash2 drafter with random weights, whose drafts are nearly always wrong."""
    config = DraftConfig.from_dict(drafter_config(**overrides))
    mx.random.seed(seed)
    drafter = network_for(config)(config)
    mx.eval(drafter.parameters())
    return drafter


def greedy(target: Target, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """The greedy text of mlx-lm's own loop, including the EOS token."""
    tokens: list[int] = []
    if max_tokens:
        steps = generate_step(mx.array(prompt), target.model, max_tokens=max_tokens, **options)
        for token, _ in steps:
            tokens.append(token)
            if token in target.tokenizer.eos_token_ids:
                break
    return tokens


def save_weights(folder: Path, module: nn.Module, name: str = "model.safetensors") -> None:
    mx.save_safetensors(str(folder / name), dict(tree_flatten(module.parameters())))


def save_target(folder: Path, family: str = "qwen3", **overrides: Any) -> Path:
    """Save a target as the hub has it: config, weights in one file, tokenizer."""
    config = model_config(family, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_weights(folder, random_model(config))
    tokenizer().save_pretrained(folder)
    return folder


def save_drafter(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a drafter: config, and weights in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafter_config(**overrides)))
    save_weights(folder, random_drafter(seed, **overrides))
    return folder


def save_adapter(folder: Path, model: Path, kind: str, rank: int = 4, scale: float = 4.0) -> Path:
    """Save a random adapter of the last two layers, in the format of `mlx_lm.lora`."""
    network, _ = load_model(model)
    config: dict[str, Any] = {"fine_tune_type": kind, "num_layers": 2}
    config["lora_parameters"] = {"rank": rank, "scale": scale, "dropout": 0.3}
    if kind == "dora":
        config["lora_parameters"]["keys"] = ["self_attn.q_proj", "mlp.down_proj"]
    if kind != "full":
        linear_to_lora_layers(network, 2, config["lora_parameters"], use_dora=kind == "dora")
    ends = ("lora_a", "lora_b", ".m") if kind != "full" else ("o_proj.weight", "in_proj_z.weight")
    layers = [(name, x) for name, x in tree_flatten(network.parameters()) if name.endswith(ends)]
    keys = mx.random.split(mx.random.key(rank), len(layers))
    weights = {
        name: x + 0.1 * mx.random.normal(x.shape, key=key)
        for (name, x), key in zip(layers, keys, strict=True)
    }
    assert weights
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def refusal(
    error: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> str:
    """The message of the error that a call must raise, after checking that it has one line.

    Arguments that are paths are passed as strings.
    """
    plain_arguments = [str(value) if isinstance(value, Path) else value for value in arguments]
    with pytest.raises(error) as caught:
        call(*plain_arguments, **options)
    message = str(caught.value)
    assert message.isprintable() and 0 < len(message) < 600
    return message
