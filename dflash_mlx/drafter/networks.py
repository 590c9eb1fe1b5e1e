"""The published drafters, as tables: names, packagings, fields, tensors, and the module of each.

The same network is published under many names: z-lab's, DeepSpec's, SpecForge's, Red Hat's and
others. They differ in the places and names of fields, in what an absent field means, in the row
that drafts first, in which layers are causal, and in the names of tensors. A new packaging is a new
row here. `docs/drafters.md` names the sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ..errors import ConfigError
from ..validation import brief

DFLASH = "dflash"
DFLASH2 = "dflash2"
DSPARK = "dspark"
EAGLE3 = "eagle3"
LILICORR = "lilicorr"
FULL = "full_attention"
SLIDING = "sliding_attention"

# Our names of the tensors that some checkpoints have and others do not.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
MASK = "mask_embedding"
ADAPTER = "hidden_dim_adapter.proj.weight"

# By kind: the module and the class of its network.
NETWORKS = {
    DFLASH: ("dflash", "DFlash"),
    DFLASH2: ("dflash2", "DFlash2"),
    DSPARK: ("dspark", "DSpark"),
    EAGLE3: ("eagle3", "Eagle3"),
    LILICORR: ("lilicorr", "LiLiCorr"),
}


def network_for(config: Any) -> Any:
    """Import and return the class of the network that a `DraftConfig` needs, a `DFlash`."""
    module, name = NETWORKS[config.kind]
    return getattr(import_module(f".{module}", __package__), name)


@dataclass(frozen=True)
class Packaging:
    """How to read the files of one publisher.

    Attributes:
        name: as `models --inspect` shows it.
        first_row: the row of a block that drafts the first token. If this is 1, the file of a
            DSpark has to name the row itself, because there are both kinds.
        sliding_is_causal: whether sliding layers are causal if the file has no flag.
        defaults: values of absent fields.
        embeds_target_config: whether the file is a copy of the target's config with the drafter's
            fields added. If so, the target's own fields (`TARGET_KEYS`) mean nothing.
        gemma4: the layers are Gemma 4's.
        tensors: maps patterns in the names of tensors to their replacements, applied in order.
    """

    name: str
    first_row: int = 1
    sliding_is_causal: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    embeds_target_config: bool = False
    gemma4: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)


ZLAB = Packaging("zlab")
JETSPEC = Packaging("jetspec")
DEEPSPEC = Packaging("deepspec", first_row=0, sliding_is_causal=False, embeds_target_config=True)
SPECFORGE = Packaging(
    "specforge",
    first_row=0,
    # Of early files, and of ModelOpt's.
    tensors={r"^logit_head\.": "", r"^(markov_w|gate_proj|joint_proj)": r"markov_head.\1"},
)
MARKOV_IN_ZLAB = replace(SPECFORGE, first_row=1)  # DSpark under DFlash's label
SPECULATORS = Packaging("speculators", defaults={"sliding_window_non_causal": True})
MUSE = Packaging(
    "muse",
    sliding_is_causal=False,
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
    sliding_is_causal=False,
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
    defaults={"block_size": 8, "mask_token_id": 0, "causal": True},
    tensors={
        r"^model\.": "",
        r"^midlayer\.": "layers.0.",
        r"^layers\.0\.hidden_norm\.": "hidden_norm.",
    },
)
# DeepSpec's networks for Gemma 4, and its EAGLE-3.
DEEPSPEC_GEMMA = replace(DEEPSPEC, name="deepspec-gemma4", gemma4=True)
DEEPSPEC_EAGLE = replace(EAGLE, name="deepspec-eagle3", embeds_target_config=True)
DEEPSPEC_GEMMA_EAGLE = replace(DEEPSPEC_EAGLE, name="deepspec-gemma4-eagle3", gemma4=True)
SPECULATORS_EAGLE = replace(EAGLE, name="speculators-eagle3")

# A name in `architectures`, or else a `model_type` -> its packaging and kind.
ARCHITECTURES = {
    "DFlashDraftModel": (ZLAB, DFLASH),
    "DFlash2DraftModel": (ZLAB, DFLASH2),
    "Qwen3DSparkModel": (DEEPSPEC, DSPARK),
    "DSparkDraftModel": (SPECFORGE, DSPARK),
    "Lfm2DSparkDraftModel": (replace(SPECFORGE, defaults={"rope_neox": False}), DSPARK),
    "MuseGlimmerAssistantModel": (MUSE, DFLASH),
    "muse_glimmer_assistant": (MUSE, DFLASH),
    "LiLiCorrDraftModel": (NVIDIA, LILICORR),
    "LlamaForCausalLMEagle3": (EAGLE, EAGLE3),
    "Eagle3LlamaForCausalLM": (EAGLE, EAGLE3),
    "Gemma4DSparkModel": (DEEPSPEC_GEMMA, DSPARK),
    "Qwen3Eagle3Model": (DEEPSPEC_EAGLE, EAGLE3),
    "Gemma4Eagle3Model": (DEEPSPEC_GEMMA_EAGLE, EAGLE3),
}
# In a config of Speculators: `speculators_model_type` -> what the drafter is.
SPECULATORS_KINDS = {
    "dflash": (SPECULATORS, DFLASH),
    "dflash2": (SPECULATORS, DFLASH2),
    "dspark": (SPECULATORS, DSPARK),
    "eagle3": (SPECULATORS_EAGLE, EAGLE3),
}
PACKAGINGS = {row.name: row for row, _ in (*ARCHITECTURES.values(), *SPECULATORS_KINDS.values())}
PACKAGINGS |= {row.name: row for row in (JETSPEC, SPECFORGE)}
# In a label in small letters -> what a drafter is that is not loaded from its config.
OTHER_KINDS = {
    "mtp": "an MTP head, which drafts for the one target that it was trained with",
    "nextn": "an MTP head, which drafts for the one target that it was trained with",
    "peagle": "a P-EAGLE head, which is another network",
    "eagle3": "an EAGLE-3 head of another network than Llama's and Qwen3's",
    "eagle": "an EAGLE head of version 1 or 2, which is another network",
    "medusa": "a Medusa head, which is another network",
    "xpress": "an XPress drafter, a DFlash whose block a second head corrects in several passes",
    "gemma4": "a Gemma 4 assistant, which loads with its target only",
}
# `model_type` of drafters that are built from their target: Gemma 4's assistants, and the end of it
# in MTP heads with a folder of their own.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
STANDALONE = "_mtp"

# Where a field may stand, the place that wins first; "" is the root.
PLACES = ("dflash_config", "dspark_config", "eagle_config", "transformer_layer_config", "")
# Fields that only drafters' configs have: one of them tells a drafter from a language model.
DRAFTER_FIELDS = frozenset(PLACES[:-1]) | {
    "speculators_model_type",
    "target_layer_ids",
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "markov_rank",
}
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
# Keys that any config.json may have: versions, tokens, training, confidence heads. A warning names
# every other key that is not read.
IGNORED_KEYS = re.compile(
    r"(torch_)?dtype|model_type|auto_map|_name_or_path|(transformers|speculators)_version|use_cache"
    r"|(\w+_)?token_ids?|initializer_range|\w+_dropout|num_anchors|max_anchors|loss_\w+|ttt_\w+"
    r"|\w*confidence_\w+|pretraining_tp|embed_requires_grad|step_loss_decay|mrope_\w+"
    r"|lilicorr_enabled|speculators_config"
)
# Keys that mean another network unless they have one of these values.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "projector_type": (DFLASH, DFLASH2, DSPARK, LILICORR),
    "hidden_act": ("silu",),
    "draft_ffn_type": ("dense",),
    **dict.fromkeys(("hc_mult", "parallel_draft_step", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(
        "next_layer_regular use_input_layernorm_in_first_layer use_last_layernorm "
        "use_aux_hidden_state".split(),
        (True,),
    ),
    **dict.fromkeys(
        "mlp_bias gating enable_qwen35_gated_q_proj log_snr_conditioning fc_norm fc_layernorm "
        "draft_shift use_heterogeneous_kv attention_k_eq_v use_mtp_layernorm enable_moe_block "
        "use_double_wide_mlp draft_adapter_rank gru_hidden_dim emb_dim pure_draft_prefix_len "
        "global_head_dim hidden_size_per_layer_input num_global_key_value_heads conv_kernel_size "
        "selector_rank markov_rank attn_output_gate attn_logit_softcapping num_experts "
        "num_local_experts n_routed_experts".split(),
        (0,),  # false and null count as 0
    ),
}
# In a copy of the target's config (DeepSpec's), these keys describe the target, not the drafter.
TARGET_KEYS = frozenset(
    "partial_rotary_factor attn_output_gate attn_logit_softcapping num_experts num_local_experts "
    "n_routed_experts".split()
)
# Tensors that are not needed: maps from target to draft vocabularies, rotations, confidence heads.
UNUSED_TENSORS = re.compile(r"^t2d$|rotary_emb\.inv_freq$|(^|\.)confidence_(head|proj)\.")


def needs_target(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a drafter that is built from its target."""
    kind = str(config.get("model_type"))
    return kind in ASSISTANTS or kind.endswith(STANDALONE)


def our_name(packaging: Packaging, tensor: str) -> str | None:
    """Translate the name of a stored tensor to ours; None if the tensor is not needed."""
    if UNUSED_TENSORS.search(tensor):
        return None
    for pattern, ours in packaging.tensors.items():
        tensor = re.sub(pattern, ours, tensor)
    return tensor


def identify(config: Mapping[str, Any], where: str) -> tuple[Packaging, str]:
    """Find the packaging and the kind that a config's labels mean. Raises `ConfigError`."""
    names = config.get("architectures")
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if config.keys() & {"speculators_model_type", "transformer_layer_config"}:
        key = "speculators_model_type"
        kinds = SPECULATORS_KINDS
        label = config.get(key)
    else:
        key = "architectures"
        kinds = ARCHITECTURES
        label = names or config.get("model_type")
        if isinstance(label, list) and len(label) == 1:
            [label] = label
        if label == "LlamaForCausalLM" and "draft_vocab_size" in config:
            label = "LlamaForCausalLMEagle3"  # as EAGLE-3's authors label it
        elif nested.get("projector_type") == LILICORR or nested.get("lilicorr_enabled"):
            label = "LiLiCorrDraftModel"
    text = str(label).lower()
    other = next((kind for part, kind in OTHER_KINDS.items() if part in text), None)
    if isinstance(label, str) and label in kinds:
        packaging, kind = kinds[label]
    elif other is not None:
        raise ConfigError(f"{where}: {brief(label)} is {other}, which dflash-mlx cannot load.")
    elif key == "architectures" and not names:
        packaging = ZLAB
        kind = DFLASH
    else:
        raise ConfigError(f"{where}: {key} {brief(label)} is not a known drafter.")
    is_jetspec = (packaging, kind) == (ZLAB, DFLASH) and "causal_head" in (*config, *nested)
    return (JETSPEC if is_jetspec else packaging), kind
