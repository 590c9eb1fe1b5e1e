"""The packagings that block drafters are published in, as data.

The same network is published under many names: z-lab's, DeepSpec's, SpecForge's, Red Hat's and
others. They differ in the places and names of fields, in what an absent field means, in the row
that drafts first, in which layers are causal, and in the names of tensors. A new packaging is a new
row here. `docs/drafters.md` names the sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

DFLASH, DFLASH2, DSPARK, EAGLE3 = "dflash", "dflash2", "dspark", "eagle3"
LILICORR = "lilicorr"
FULL, SLIDING = "full_attention", "sliding_attention"

# Tensors that some checkpoints bring and others do not, by our names.
EMBEDDING, HEAD, MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
ADAPTER = "hidden_dim_adapter.proj.weight"

# Where a field may stand, the place that wins first; "" is the root.
PLACES = ("dflash_config", "dspark_config", "eagle_config", "transformer_layer_config", "")


@dataclass(frozen=True)
class Packaging:
    """What the files of one publisher mean.

    Attributes:
        name: as `models --inspect` shows it.
        first_row: by kind, the row of a block that drafts the first token; None if the file has to
            say it.
        causal: without a flag in the file, "sliding" layers are causal, or none ("never").
        defaults: values of absent fields.
        copied: the file is a copy of the target's config with the drafter's fields added, so the
            target's own fields (`COPIED`) mean nothing.
        gemma4: the layers are Gemma 4's.
        tensors: beginnings of tensors' names -> our beginnings.
        unused_tensors: stored, and not needed.
    """

    name: str
    first_row: Mapping[str, int | None]
    causal: Literal["sliding", "never"] = "sliding"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    copied: bool = False
    gemma4: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    unused_tensors: frozenset[str] = frozenset()


ZLAB = Packaging("zlab", {DFLASH: 1, DFLASH2: 1, DSPARK: None})
JETSPEC = Packaging("jetspec", {DFLASH: 1, DSPARK: None})
DEEPSPEC = Packaging("deepspec", {DFLASH: 0, DSPARK: 0}, causal="never", copied=True)
SPECFORGE = Packaging(
    "specforge",
    {DFLASH: 0, DSPARK: 0},
    tensors={"logit_head.": ""},  # of early files
)
SPECULATORS = Packaging(
    "speculators",
    {DFLASH: 1, DFLASH2: 1, DSPARK: None},
    defaults={"draft_vocab_size": 32000, "sliding_window_non_causal": True},
    unused_tensors=frozenset({"t2d"}),
)
MUSE = Packaging(
    "muse",
    {DFLASH: 1},
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
NVIDIA = Packaging("lilicorr", {LILICORR: 1}, causal="never", tensors={"model.": ""})
# EAGLE-3 by SGLang, SpecForge, NVIDIA and its authors. A head drafts as long as one asks for, the
# worse the longer, and has no masks: both numbers are ours.
EAGLE = Packaging(
    "eagle3",
    {EAGLE3: 1},
    defaults={"block_size": 8, "mask_token_id": 0},
    tensors={
        prefix + stored: ours
        for prefix in ("", "model.")
        for stored, ours in (
            ("midlayer.hidden_norm.", "hidden_norm."),
            ("layers.0.hidden_norm.", "hidden_norm."),
            ("midlayer.", "layers.0."),
        )
    }
    | {"model.": ""},
    unused_tensors=frozenset({"t2d"}),
)
# DeepSpec's networks for Gemma 4, and its EAGLE-3.
DEEPSPEC_GEMMA = replace(DEEPSPEC, name="deepspec-gemma4", gemma4=True)
DEEPSPEC_EAGLE = replace(EAGLE, name="deepspec-eagle3", copied=True)
DEEPSPEC_GEMMA_EAGLE = replace(DEEPSPEC_EAGLE, name="deepspec-gemma4-eagle3", gemma4=True)
SPECULATORS_EAGLE = replace(
    EAGLE, name="speculators-eagle3", defaults={**EAGLE.defaults, "draft_vocab_size": 32000}
)


# A name in `architectures` -> its packaging and kind.
ARCHITECTURES = {
    "DFlashDraftModel": (ZLAB, DFLASH),
    "DFlash2DraftModel": (ZLAB, DFLASH2),
    "Qwen3DSparkModel": (DEEPSPEC, DSPARK),
    "DSparkDraftModel": (SPECFORGE, DSPARK),
    "Lfm2DSparkDraftModel": (replace(SPECFORGE, defaults={"rope_neox": False}), DSPARK),
    "MuseGlimmerAssistantModel": (MUSE, DFLASH),
    "LiLiCorrDraftModel": (NVIDIA, LILICORR),
    "LlamaForCausalLMEagle3": (EAGLE, EAGLE3),
    "Eagle3LlamaForCausalLM": (EAGLE, EAGLE3),
    "Gemma4DSparkModel": (DEEPSPEC_GEMMA, DSPARK),
    "Qwen3Eagle3Model": (DEEPSPEC_EAGLE, EAGLE3),
    "Gemma4Eagle3Model": (DEEPSPEC_GEMMA_EAGLE, EAGLE3),
}
# `speculators_model_type` -> what it is; the architecture's name says no more there.
SPECULATORS_KINDS = {
    "dflash": (SPECULATORS, DFLASH),
    "dflash2": (SPECULATORS, DFLASH2),
    "dspark": (SPECULATORS, DSPARK),
    "eagle3": (SPECULATORS_EAGLE, EAGLE3),
}

# In a label in small letters -> what a drafter is that is not loaded from its config.
OTHER_KINDS = {
    "mtp": "an MTP head, which drafts for the one target that it was trained with",
    "nextn": "an MTP head, which drafts for the one target that it was trained with",
    "peagle": "a P-EAGLE head, which is another network",
    "eagle3": "an EAGLE-3 head of another network than Llama's and Qwen3's",
    "eagle": "an EAGLE head of version 1 or 2, which is another network",
    "medusa": "a Medusa head, which is another network",
    "gemma4": "a Gemma 4 assistant, which loads with its target only",
}
# Fields that only drafters' configs have: one of them tells a drafter from a language model.
DRAFTER_FIELDS = frozenset(
    (
        "dflash_config dspark_config eagle_config transformer_layer_config speculators_model_type "
        "target_layer_ids block_size mask_token_id draft_vocab_size markov_rank"
    ).split()
)
# `model_type` of drafters that are built from their target: Gemma 4's assistants, and the end of it
# in MTP heads with a folder of their own.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
STANDALONE = "_mtp"


def needs_target(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter that is built from its target."""
    kind = str(config.get("model_type"))
    return kind in ASSISTANTS or kind.endswith(STANDALONE)


# Fields with several spellings, by our name. The spellings have to agree.
SPELLINGS = {
    "causal": ("causal", "is_causal", "causal_head", "dflash_query_causal"),
    "rope_neox": ("rope_is_neox_style", "is_neox_style"),
    "markov_rank": ("markov_rank", "dspark_markov_rank"),
    "shifted_layer_ids": ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
}
# Keys that say which row drafts first, and the row for true; the other one is for false.
FIRST_ROW_FLAGS = {
    "sample_from_anchor": 0,
    "query_zero_predicts_next": 0,
    "shift_label": 0,
    "dspark_bonus_anchor": 1,
}


# Keys that change nothing about the network.
HARMLESS = frozenset(
    (
        # the library's own record
        "auto_map model_type dtype torch_dtype transformers_version _name_or_path "
        "speculators_version use_cache return_dict output_attentions output_hidden_states "
        "problem_type id2label label2id is_encoder_decoder is_decoder chunk_size_feed_forward "
        "use_return_dict finetuning_task torchscript pruned_heads add_cross_attention "
        "cross_attention_hidden_size tie_encoder_decoder prefix task_specific_params "
        "tokenizer_class use_bfloat16 tf_legacy_loss _attn_implementation "
        "_attn_implementation_autoset pretraining_tp has_no_defaults_at_init base_model_ep_plan "
        "base_model_pp_plan base_model_tp_plan _experts_implementation attn_implementation "
        "library_name license tags target_model_type target_text_model_type use_aux_hidden_state "
        # tokens that the target decides about
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
        "begin_suppress_tokens bad_words_ids "
        # training
        "attention_dropout hidden_dropout embedding_dropout initializer_range num_anchors "
        "max_anchors confidence_head_alpha loss_decay_gamma loss_type loss_weights loss_gamma "
        "loss_config ttt_steps ttt_length step_loss_decay draft_num_hidden_layers "
        "target_model_name_or_path initial_context_length embed_requires_grad freeze_embed "
        "router_aux_loss_coef output_router_logits "
        # hints for serving: any value gives the same text
        "dflash_initial_block_size prefer_requested_block_size runtime_block_size "
        "dspark_draft_topk confidence_threshold confidence_temperatures sts_temperatures "
        # all positions of a text are alike
        "mrope_section mrope_interleaved "
        # of experts, which `NEUTRAL` refuses
        "decoder_sparse_step norm_topk_prob mlp_only_layers num_experts_per_tok "
        "moe_intermediate_size shared_expert_intermediate_size "
        # decided by the tensors
        "has_own_embed_tokens "
        # of confidence heads, which decoding does not read
        "enable_confidence_head use_confidence_head confidence_head_with_markov"
    ).split()
)
# Fields of the target in a copied config (DeepSpec's): the drafter has no such part.
COPIED = frozenset(
    (
        "partial_rotary_factor attn_output_gate output_gate_type full_attention_interval "
        "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_value_head_dim num_experts num_local_experts "
        "n_routed_experts n_shared_experts n_group topk_group routed_scaling_factor "
        "first_k_dense_replace moe_layer_freq swiglu_limit swiglu_alpha mamba_ssm_dtype "
        "mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers "
        "rope_interleave use_qk_norm attn_type_list experts_per_token vision_config "
        "language_model_only image_token_id video_token_id vision_start_token_id "
        "vision_end_token_id attn_logit_softcapping query_pre_attn_scalar use_sliding_window "
        "max_window_layers sliding_window vocab_size_per_layer_input num_kv_shared_layers "
        "top_k_experts use_bidirectional_attention"
    ).split()
)
# Keys that change the network unless they have this value.
NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "draft_ffn_type": "dense",
    "partial_rotary_factor": 1,
    "hc_mult": 1,
    "parallel_draft_step": 1,
    **dict.fromkeys(
        "next_layer_regular use_input_layernorm_in_first_layer use_last_layernorm".split(), True
    ),
    **dict.fromkeys(
        "mlp_bias attn_output_gate gating enable_qwen35_gated_q_proj log_snr_conditioning fc_norm "
        "fc_layernorm draft_shift use_heterogeneous_kv attention_k_eq_v use_mtp_layernorm "
        "enable_moe_block use_double_wide_mlp".split(),
        False,
    ),
    **dict.fromkeys(
        "draft_adapter_rank gru_hidden_dim emb_dim pure_draft_prefix_len global_head_dim "
        "hidden_size_per_layer_input num_global_key_value_heads attn_logit_softcapping "
        "num_experts num_local_experts n_routed_experts".split(),
        0,
    ),
}

# Of rotations and of confidence heads, in any packaging.
UNUSED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)confidence_head\.")
PACKAGINGS = {
    row.name: row
    for row in (
        *(ZLAB, JETSPEC, DEEPSPEC, DEEPSPEC_GEMMA, SPECFORGE, SPECULATORS, MUSE),
        *(NVIDIA, EAGLE, SPECULATORS_EAGLE, DEEPSPEC_EAGLE, DEEPSPEC_GEMMA_EAGLE),
    )
}


def our_name(packaging: Packaging, tensor: str) -> str | None:
    """The name of a stored tensor in our networks; None if it is not needed."""
    if tensor in packaging.unused_tensors or UNUSED_TENSORS.search(tensor):
        return None
    for start, ours in packaging.tensors.items():
        if tensor.startswith(start):
            return ours + tensor.removeprefix(start)
    return tensor
