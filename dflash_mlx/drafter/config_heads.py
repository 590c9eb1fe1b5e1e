"""What a config says about the part after the backbone, by kind: one reader and its fields each.

A new kind of network is a reader here, its name in `packagings` and its module in `networks`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .config_reader import (
    BOOLEAN,
    OBJECT,
    POSITIVE,
    REQUIRED,
    ConfigReader,
    FieldCheck,
    one_of,
    whole,
)
from .packagings import DFLASH, DFLASH2, DSPARK, EAGLE3, LILICORR, SPECFORGE, ZLAB

T = TypeVar("T")
WIDTH, TRUE = whole(2**20), FieldCheck(lambda value: value is True, "true")


@dataclass(frozen=True)
class Markov:
    """DSpark's head: a bias on a row's logits that the token before it decides.

    Attributes:
        rank: of the bias.
        type: "vanilla", "gated" by the row's hidden state, or "rnn" over the drafted tokens.
    """

    rank: int
    type: str = "vanilla"


@dataclass(frozen=True)
class Lattice:
    """LiLiCorr's head; fields as published, without their `lilicorr_`."""

    candidate_topk: int
    hidden_size: int  # absent or 0: the drafter's
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float


@dataclass(frozen=True)
class Eagle:
    """EAGLE-3's norms, which differ between publishers.

    Attributes:
        norm_before_residual: the residual stream begins with the normed feature.
        norm_before_fc, fc_norm: a norm of all taps side by side, or one of each tap, comes first.
        norm_output: the features of drafted rows are the states after the final norm (EAGLE 3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read_part(read: ConfigReader, part: type[T], default: Any, prefix: str = "", **known: Any) -> T:
    """A part of the config, each field under `prefix` and its name; `known` ones are not read."""
    checks = {"float": POSITIVE, "bool": BOOLEAN}
    for item in fields(part):  # type: ignore[arg-type]
        if item.name not in known:
            check = checks.get(str(item.type), WIDTH)
            known[item.name] = read.get(prefix + item.name, check, default)
    return part(**known)


def _eagle(read: ConfigReader, kind: str) -> dict[str, Any]:
    read.get("use_aux_hidden_state", TRUE)
    read.get("speculators_config", OBJECT)
    return {"eagle": read_part(read, Eagle, False)}


def _lilicorr(read: ConfigReader, kind: str) -> dict[str, Any]:
    read.get("lilicorr_enabled", TRUE)
    width = read.get("lilicorr_hidden_size", whole(2**20, 0), 0)
    width = width or read.get("hidden_size", WIDTH, REQUIRED)
    lattice = read_part(read, Lattice, REQUIRED, "lilicorr_", hidden_size=width)
    if width % lattice.num_heads:
        raise read.error("lilicorr_num_heads", f"must divide {width}")
    kernel = read.get("conv_kernel_size", whole(64, 0), 0)
    return {"lattice": lattice} | (_convolution(read) if kernel else {})


def _convolution(read: ConfigReader) -> dict[str, Any]:
    found = {
        "conv_kernel_size": read.get("conv_kernel_size", whole(64), REQUIRED),
        "conv_group_size": read.get("conv_group_size", WIDTH, REQUIRED),
    }
    hidden = read.get("hidden_size", WIDTH, REQUIRED)
    if hidden % found["conv_group_size"]:
        raise read.error(read.place("conv_group_size"), f"must divide {hidden}")
    return found


def _dflash2(read: ConfigReader, kind: str) -> dict[str, Any]:
    if read.get("markov_rank", whole(2**20, 0)):
        raise read.error(read.place("markov_rank"), "must be 0 in a DFlash2 drafter")
    return _convolution(read) | {
        "selector_rank": read.get("selector_rank", WIDTH, REQUIRED),
        "selector_top_k": read.get("selector_top_k", whole(1024), REQUIRED),
    }


def _markov(read: ConfigReader, kind: str) -> dict[str, Any]:
    """Of a DFlash or DSpark; a rank means DSpark."""
    rank = read.get("markov_rank", whole(2**20, 0), REQUIRED if kind == DSPARK else None)
    head = read.get("markov_head_type", one_of("vanilla", "gated", "rnn"), "vanilla")
    if not rank:
        return {"kind": DFLASH}
    if read.packaging is ZLAB:
        # DSpark under DFlash's label. There are both kinds, so the file has to say more.
        read.packaging = replace(SPECFORGE, first_row={DSPARK: None})
    return {"kind": DSPARK, "markov": Markov(rank, head)}


# By kind: reads the fields of what comes after the backbone.
READERS = {
    **{DFLASH: _markov, DSPARK: _markov, DFLASH2: _dflash2},
    **{EAGLE3: _eagle, LILICORR: _lilicorr},
}
