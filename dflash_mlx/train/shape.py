"""The shape of a drafter for a target, in the layout that drafters are published in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import SettingsError
from ..targets import Target
from ..validation import text_config

ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
DEEP = 12  # target layers from which on five are tapped, and fewer than that three
# What DFlash2 has in its `dflash_config` besides, and DSpark in its config.
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 8,
}
MARKOV = {
    "markov_rank": 64,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "sample_from_anchor": True,
}


def draft_shape(
    target: Target,
    kind: str,
    block_size: int,
    mask_token: int,
    layers: int | None = None,
    causal: bool = False,
    draft_tokens: int | None = None,
) -> dict[str, Any]:
    """The config.json of a new drafter.

    Args:
        kind: "dflash", "dflash2" or "dspark".
        block_size: rows of a block, the anchor included.
        mask_token: what the other rows' input is.
        layers: of the drafter; None is one for every eight of the target's, and one, at most five.
        causal: whether a row of a block sees only the rows before it.
        draft_tokens: how many tokens can be drafted, through a head of the drafter's own; None is
            all of them, through the target's head. For "dspark" only.

    Raises `SettingsError`.
    """
    check_kind(kind, block_size, draft_tokens)
    _check_size(target, layers, draft_tokens)
    layers = layers or min(5, 1 + round(target.num_layers / 8))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        **_like(target),
        "num_hidden_layers": layers,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "layer_types": ["full_attention"] * layers,
        "is_causal": causal,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": tap_layers(target.num_layers),
        },
    }
    if kind == "dflash2":
        config["dflash_config"] |= SELECTOR
    if kind == "dspark":
        config |= MARKOV
    if draft_tokens is not None:
        config["draft_vocab_size"] = draft_tokens
    return config


def _like(target: Target) -> dict[str, Any]:
    """What a drafter has in common with its target."""
    shape = text_config(target.config)
    hidden, heads = target.hidden_size, shape["num_attention_heads"]
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
    }


def _check_size(target: Target, layers: int | None, draft_tokens: int | None) -> None:
    """Raise `SettingsError` for a drafter that is larger than its target."""
    if layers is not None and layers > target.num_layers:
        raise SettingsError(
            f"A drafter of {layers} layers is deeper than {target.name}, which has "
            f"{target.num_layers}: lower --layers."
        )
    if draft_tokens is not None and draft_tokens >= target.vocab_size:
        raise SettingsError(
            f"A head of {draft_tokens} tokens: {target.name} has {target.vocab_size}, all of which "
            "are drafted without --draft-tokens."
        )


def check_kind(kind: str, block_size: int, draft_tokens: int | None) -> None:
    """Raise `SettingsError` for what no drafter can be, whatever its target."""
    if kind not in ARCHITECTURES:
        raise SettingsError(f"A drafter is of kind {' or '.join(ARCHITECTURES)}, not {kind!r}.")
    if block_size < 2:
        raise SettingsError(f"A block has two rows at least, not {block_size}.")
    if draft_tokens is not None and kind != "dspark":
        raise SettingsError(f"A head of some tokens goes with dspark, not with {kind}.")


def tap_layers(layers: int) -> list[int]:
    """Which layers of a target are read: five from the second to the third last, as DFlash does
    (arXiv 2602.06036); of a shallow target three, the last among them."""
    if layers < DEEP:
        return sorted({min(1, layers - 1), layers // 2, layers - 1})
    return [round(1 + i * (layers - 4) / 4) for i in range(5)]


def mask_token(target: Target, used: Iterable[int]) -> int:
    """A token that stands for an unknown one: one that no text has.

    Rows of the embedding beyond the tokenizer's come first, then special tokens, then any other.

    Raises `SettingsError` when every token is used.
    """
    tokenizer, taken = target.tokenizer, set(used) | set(target.tokenizer.eos_token_ids)
    special = sorted(getattr(tokenizer, "all_special_ids", []), reverse=True)
    beyond = range(len(tokenizer.get_vocab()), target.vocab_size)
    for token in (*beyond, *special, *range(target.vocab_size - 1, -1, -1)):
        if token not in taken and token < target.vocab_size:
            return token
    raise SettingsError(f"{target.name}: every token occurs in the data, so none can be the mask.")
