"""The packagings that block drafters are published in, a row each, and every key they are known by.

The same network is published under many names: z-lab's, DeepSpec's, SpecForge's, Red Hat's ... They
differ in where a field stands and how it is called, in what an absent field means, which row of a
block drafts first, which layers are causal, and how tensors are called. All of that is here, as
data: a new packaging is a new row. `docs/drafters.md` names the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
FULL, SLIDING = "full_attention", "sliding_attention"

# Tensors that some checkpoints bring and others do not, by our names.
EMBEDDING, HEAD, MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
ADAPTER, CONFIDENCE = "hidden_dim_adapter.proj.weight", "confidence_head.proj.weight"

# Where a field may stand, the place that wins first; "" is the root.
PLACES = ("dflash_config", "dspark_config", "transformer_layer_config", "")


@dataclass(frozen=True)
class Packaging:
    """What one publisher's files mean where they say nothing.

    Attributes:
        name: as `--inspect` shows it.
        first_row: the row of a block that drafts the first token, of DFlash and of DSpark; None:
            the file has to say it.
        causal: whether a row of the block is blind to later ones where no flag says so: "sliding"
            in layers that `layer_types` calls sliding, "never" in none.
        defaults: fields that may be left out, and what they are then.
        copied: the file is a copy of the target's config with the drafter's fields written over
            it, so the target's own fields (`COPIED`) describe nothing.
        confidence: whether a DSpark drafter has a confidence head where no key says so.
        reduced: whether it has drafters that know only some of the target's tokens.
        other_width: whether it has drafters that are wider or narrower than their target.
        tensors: how names that are not ours begin -> what that is in ours.
        unused_tensors: stored, and not needed.
    """

    name: str
    first_row: Mapping[str, int | None]
    causal: Literal["sliding", "never"] = "sliding"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    copied: bool = False
    confidence: bool = False
    reduced: bool = True
    other_width: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    unused_tensors: frozenset[str] = frozenset()


ZLAB = Packaging("zlab", {DFLASH: 1, DFLASH2: 1, DSPARK: None}, reduced=False)
JETSPEC = Packaging("jetspec", {DFLASH: 1, DSPARK: None}, other_width=True)
DEEPSPEC = Packaging("deepspec", {DFLASH: 0, DSPARK: 0}, causal="never", copied=True)
SPECFORGE = Packaging(
    "specforge",
    {DFLASH: 0, DSPARK: 0},
    confidence=True,  # RadixArk's files have the head and no key
    tensors={"logit_head.": ""},  # of early files
)
SPECULATORS = Packaging(
    "speculators",
    {DFLASH: 1, DFLASH2: 1, DSPARK: None},
    other_width=True,
    defaults={"draft_vocab_size": 32000, "sliding_window_non_causal": True},
    unused_tensors=frozenset({"t2d"}),
)
MUSE = Packaging(
    "muse",
    {DFLASH: 1},
    reduced=False,
    causal="never",
    defaults={
        "block_size": 16,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "layer_types": SLIDING,  # all of them
        "sliding_window": 2048,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "vocab_size": 202048,
    },
    tensors={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
)


@dataclass(frozen=True)
class Architecture:
    """What a name in `architectures` stands for."""

    packaging: Packaging
    kind: str
    rope_neox: bool = True  # the rotary pairs where no key says it: (i, i + d/2), or (2i, 2i + 1)


ARCHITECTURES = {
    "DFlashDraftModel": Architecture(ZLAB, DFLASH),
    "DFlash2DraftModel": Architecture(ZLAB, DFLASH2),
    "Qwen3DSparkModel": Architecture(DEEPSPEC, DSPARK),
    "DSparkDraftModel": Architecture(SPECFORGE, DSPARK),
    "Lfm2DSparkDraftModel": Architecture(SPECFORGE, DSPARK, rope_neox=False),
    "MuseGlimmerAssistantModel": Architecture(MUSE, DFLASH),
}
OTHER_NETWORKS = {
    "Gemma4DSparkModel": "Gemma 4's own layers (four norms, shared keys and values)",
    "Qwen35DSparkModel": "gated attention, norms stored minus one and a partial rotation",
    "DominoDraftModel": "a GRU head",
    "DFlashLagunaForCausalLM": "gated attention",
}
# `speculators_model_type` -> what it is; the architecture's name says no more there.
SPECULATORS_KINDS = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}
# `projector_type` -> the kinds it may go with.
PROJECTORS = {"dflash": {DFLASH}, "dflash2": {DFLASH2}, "dspark": {DSPARK, DFLASH}}

# The spellings of what is one field, here by our name for it. They have to agree.
SPELLINGS = {
    "causal": ("causal", "is_causal", "causal_head", "dflash_query_causal"),
    "rope_neox": ("rope_is_neox_style", "is_neox_style"),
    "markov_rank": ("markov_rank", "dspark_markov_rank"),
    "confidence": ("enable_confidence_head", "use_confidence_head"),
    "ids of Speculators": ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    "sinks": ("attention_sink_bias",),
    "sinks of sliding layers": ("add_swa_attention_sink_bias",),
    "sinks of full layers": ("add_full_attention_sink_bias",),
}
# Keys that say which row drafts first, and the row for true; the other one is for false.
FIRST_ROW_FLAGS = {"sample_from_anchor": 0, "shift_label": 0, "dspark_bonus_anchor": 1}


def _keys(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


# Accepted and not used, with the reason that `--inspect` gives.
HARMLESS = {
    **_keys(
        "the library's own record",
        "auto_map model_type dtype torch_dtype transformers_version _name_or_path speculators_"
        "version use_cache return_dict output_attentions output_hidden_states problem_type "
        "id2label label2id is_encoder_decoder is_decoder chunk_size_feed_forward use_return_dict "
        "finetuning_task torchscript pruned_heads add_cross_attention cross_attention_hidden_size "
        "tie_encoder_decoder prefix task_specific_params tokenizer_class use_bfloat16 tf_legacy_"
        "loss _attn_implementation _attn_implementation_autoset pretraining_tp has_no_defaults_"
        "at_init base_model_ep_plan base_model_pp_plan base_model_tp_plan _experts_implementation "
        "attn_implementation library_name license tags",
    ),
    **_keys(
        "tokens that the target decides about",
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
        "begin_suppress_tokens bad_words_ids",
    ),
    **_keys(
        "of training",
        "attention_dropout hidden_dropout embedding_dropout initializer_range num_anchors "
        "max_anchors confidence_head_alpha loss_decay_gamma loss_type loss_weights loss_gamma "
        "loss_config ttt_steps initial_context_length embed_requires_grad freeze_embed",
    ),
    **_keys(
        "a hint for serving; any value gives the same text",
        "draft_window_size dflash_initial_block_size prefer_requested_block_size "
        "dspark_draft_topk confidence_threshold confidence_temperatures sts_temperatures",
    ),
    **_keys("all positions of a text are alike", "mrope_section mrope_interleaved"),
    **_keys("decided by the tensors", "confidence_head_with_markov has_own_embed_tokens"),
}
# Fields of targets that a copied config (DeepSpec's) still has; they describe nothing there.
COPIED = _keys(
    "copied from the target; the drafter has no such part",
    "partial_rotary_factor attn_output_gate output_gate_type full_attention_interval "
    "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
    "linear_value_head_dim num_experts num_experts_per_tok num_local_experts decoder_sparse_step "
    "moe_intermediate_size shared_expert_intermediate_size norm_topk_prob mlp_only_layers "
    "output_router_logits router_aux_loss_coef n_routed_experts n_shared_experts n_group "
    "topk_group routed_scaling_factor first_k_dense_replace moe_layer_freq swiglu_limit "
    "swiglu_alpha mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings "
    "num_nextn_predict_layers rope_interleave use_qk_norm attn_type_list experts_per_token "
    "vision_config language_model_only image_token_id video_token_id vision_start_token_id "
    "vision_end_token_id attn_logit_softcapping query_pre_attn_scalar use_sliding_window "
    "max_window_layers sliding_window",
)
# Refused unless the value is the one that means nothing: key -> (that value, what it would be).
OTHER_VALUES: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "another activation"),
    "mlp_bias": (False, "biases in the MLP"),
    "partial_rotary_factor": (1, "a partial rotation"),
    "attn_output_gate": (False, "gated attention"),
    "gating": (False, "gated attention"),
    "enable_qwen35_gated_q_proj": (False, "gated attention"),
    "log_snr_conditioning": (False, "a network that is told how noisy its input is"),
    "draft_adapter_rank": (0, "adapters"),
    "fc_norm": (False, "a norm around fc"),
    "fc_layernorm": (False, "a norm around fc"),
    "gru_hidden_dim": (0, "a GRU head"),
    "emb_dim": (0, "a GRU head"),
    "pure_draft_prefix_len": (0, "a head that leaves the first rows out"),
    "draft_shift": (False, "a shift that no published head has"),
    "draft_ffn_type": ("dense", "a mixture of experts"),
    "use_heterogeneous_kv": (False, "a fusion of taps per layer"),
    "attention_k_eq_v": (False, "keys that are values"),
    "global_head_dim": (0, "heads of another size in full layers"),
    "num_global_key_value_heads": (0, "other keys and values in full layers"),
    "hc_mult": (1, "several residual streams"),
    "attn_logit_softcapping": (0, "capped attention"),
    "num_experts": (0, "a mixture of experts"),
    "num_local_experts": (0, "a mixture of experts"),
    "n_routed_experts": (0, "a mixture of experts"),
}
# Keys that begin so and are not known: the drafter is inside a target (DeepSeek-V4, -V4.1).
INSIDE_A_TARGET = "dspark_"


# Tensors that any file may have and that nothing is computed with, by how their names end.
UNUSED_TENSORS = ("rotary_emb.inv_freq",)
PACKAGINGS = {row.name: row for row in (ZLAB, JETSPEC, DEEPSPEC, SPECFORGE, SPECULATORS, MUSE)}


def our_name(packaging: Packaging, tensor: str) -> str | None:
    """What a stored tensor is called in our networks; None where nothing is computed with it."""
    if tensor in packaging.unused_tensors or tensor.endswith(UNUSED_TENSORS):
        return None
    for start, ours in packaging.tensors.items():
        if tensor.startswith(start):
            return ours + tensor.removeprefix(start)
    return tensor


def harmless(packaging: Packaging) -> Mapping[str, str]:
    """The keys that are accepted and not used, with the reason."""
    return {**HARMLESS, **COPIED} if packaging.copied else HARMLESS
