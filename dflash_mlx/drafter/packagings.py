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
            target's own fields (`EXPECTED_OF_ITS_OWN`) mean nothing.
        gemma4: the layers are Gemma 4's.
        tensors: patterns in tensors' names -> what stands there in ours; applied in order.
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
    # Of early files, and of ModelOpt's.
    tensors={r"^logit_head\.": "", r"^(markov_w|gate_proj|joint_proj)": r"markov_head.\1"},
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
    tensors={r"^encoder\.fc": "fc", r"^encoder\.output_norm_enc": "hidden_norm"},
)
NVIDIA = Packaging(
    "lilicorr",
    {LILICORR: 1},
    causal="never",
    tensors={
        r"^model\.": "",
        # vLLM's and SGLang's names; ours are ModelOpt's.
        r"^lilicorr\.feature_norm": "lilicorr.feature_mlp.0",
        r"^lilicorr\.feature_mlp\.up_proj": "lilicorr.feature_mlp.1",
        r"^lilicorr\.feature_mlp\.down_proj": "lilicorr.feature_mlp.3",
        r"^(lilicorr\.layers\.\d+\.mlp)\.up_proj": r"\1.0",
        r"^(lilicorr\.layers\.\d+\.mlp)\.down_proj": r"\1.2",
    },
)
# EAGLE-3 by SGLang, SpecForge, NVIDIA and its authors. A head drafts as long as one asks for, the
# worse the longer, and has no masks: both numbers are ours.
EAGLE = Packaging(
    "eagle3",
    {EAGLE3: 1},
    defaults={"block_size": 8, "mask_token_id": 0},
    tensors={
        r"^model\.": "",
        r"^midlayer\.": "layers.0.",
        r"^layers\.0\.hidden_norm\.": "hidden_norm.",
    },
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


# Keys that any config.json may have: the library's record, tokens, training, confidence heads. Each
# other key that is not read is named in a warning.
ROUTINE = re.compile(
    r"(torch_)?dtype|model_type|auto_map|_name_or_path|(transformers|speculators)_version|use_cache"
    r"|(\w+_)?token_ids?|initializer_range|\w+_dropout|num_anchors|max_anchors|loss_\w+|ttt_\w+"
    r"|\w*confidence_\w+|pretraining_tp|embed_requires_grad|step_loss_decay|mrope_\w+"
)
# Keys that mean another network unless they have this value.
EXPECTED: dict[str, Any] = {
    "hidden_act": "silu",
    "draft_ffn_type": "dense",
    **dict.fromkeys("hc_mult parallel_draft_step".split(), 1),
    **dict.fromkeys(
        "next_layer_regular use_input_layernorm_in_first_layer use_last_layernorm".split(), True
    ),
    # False, or none of them
    **dict.fromkeys(
        "mlp_bias gating enable_qwen35_gated_q_proj log_snr_conditioning fc_norm fc_layernorm "
        "draft_shift use_heterogeneous_kv attention_k_eq_v use_mtp_layernorm enable_moe_block "
        "use_double_wide_mlp draft_adapter_rank gru_hidden_dim emb_dim pure_draft_prefix_len "
        "global_head_dim hidden_size_per_layer_input num_global_key_value_heads conv_kernel_size "
        "selector_rank markov_rank".split(),
        0,
    ),
}
# The same, but in a copied config (DeepSpec's) they are the target's and say nothing.
EXPECTED_OF_ITS_OWN: dict[str, Any] = {
    "partial_rotary_factor": 1,
    **dict.fromkeys(
        "attn_output_gate attn_logit_softcapping num_experts num_local_experts "
        "n_routed_experts".split(),
        0,
    ),
}

# Of rotations and of confidence heads, in any packaging.
UNUSED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)confidence_(head|proj)\.")
PACKAGINGS = {
    row.name: row for row, _ in (*ARCHITECTURES.values(), *SPECULATORS_KINDS.values())
} | {row.name: row for row in (JETSPEC, SPECFORGE)}


def our_name(packaging: Packaging, tensor: str) -> str | None:
    """The name of a stored tensor in our networks; None if it is not needed."""
    if tensor in packaging.unused_tensors or UNUSED_TENSORS.search(tensor):
        return None
    for pattern, ours in packaging.tensors.items():
        tensor = re.sub(pattern, ours, tensor)
    return tensor
