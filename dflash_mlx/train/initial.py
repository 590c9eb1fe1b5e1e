"""A new drafter for a target: its config in the published layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..validation import text_config

if TYPE_CHECKING:
    from ..targets import Target

DEEP = 12  # targets with fewer layers are tapped at three layers instead of five
# By kind: the architecture, and further fields of the config and of its `dflash_config`.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("DFlashDraftModel", {}, {}),
    "dflash2": (
        "DFlash2DraftModel",
        {},
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8},
    ),
    "dspark": (
        "DSparkDraftModel",
        {
            "markov_rank": 64,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "sample_from_anchor": True,
        },
        {},
    ),
}


def draft_config(
    target: Target,
    kind: str,
    block_size: int,
    mask_token: int,
    layers: int | None = None,
    causal: bool = False,
) -> dict[str, Any]:
    """The config.json of a new drafter.

    Args:
        kind: "dflash", "dflash2" or "dspark".
        block_size: rows of a block, with the anchor.
        mask_token: input token of the other rows.
        layers: of the drafter; None is 1 + (target layers) / 8, at most 5.
        causal: whether rows of a block attend only to earlier rows.

    Raises `SettingsError`.
    """
    if layers is not None and layers > target.num_layers:
        raise SettingsError(
            f"A drafter of {layers} layers is deeper than {target.name}, which has "
            f"{target.num_layers}: lower --layers."
        )
    layers = layers or min(5, 1 + round(target.num_layers / 8))
    architecture, fields, nested = KINDS[kind]
    taps = tap_layers(target.num_layers)
    return {
        "architectures": [architecture],
        "model_type": "qwen3",  # of the layers; other programs read it
        **_like(target),
        "num_hidden_layers": layers,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "layer_types": ["full_attention"] * layers,
        "is_causal": causal,
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": taps, **nested},
        **fields,
    }


def _like(target: Target) -> dict[str, Any]:
    """Return the config fields that are copied from the target."""
    shape = text_config(target.config)
    hidden = target.hidden_size
    heads = shape["num_attention_heads"]
    rope = shape.get("rope_theta") or (shape.get("rope_parameters") or {}).get("rope_theta")
    return {
        "hidden_size": hidden,
        "intermediate_size": shape.get("intermediate_size") or 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_key_value_heads") or heads,
        "head_dim": shape.get("head_dim") or hidden // heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": shape.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope or 10000.0),
        "max_position_embeddings": shape.get("max_position_embeddings", 40960),
        "tie_word_embeddings": shape.get("tie_word_embeddings", False),  # it borrows the target's
    }


def tap_layers(layers: int) -> list[int]:
    """The target layers to tap.

    Five from the second to the third last, as in DFlash (arXiv 2602.06036); three in a shallow
    target.
    """
    if layers < DEEP:
        return sorted({min(1, layers - 1), layers // 2, layers - 1})
    return [round(1 + i * (layers - 4) / 4) for i in range(5)]


def mask_token(target: Target, used: Iterable[int]) -> int:
    """A token for the masked rows that occurs in no text.

    Embedding rows beyond the tokenizer's vocabulary come first, then special tokens, then others.

    Raises `SettingsError` if every token is used.
    """
    tokenizer = target.tokenizer
    taken = set(used) | set(tokenizer.eos_token_ids)
    special = sorted(getattr(tokenizer, "all_special_ids", []), reverse=True)
    beyond = range(len(tokenizer.get_vocab()), target.vocab_size)
    for token in (*beyond, *special, *range(target.vocab_size - 1, -1, -1)):
        if token not in taken and token < target.vocab_size:
            return token
    raise SettingsError(f"{target.name}: every token occurs in the data, so none can be the mask.")
