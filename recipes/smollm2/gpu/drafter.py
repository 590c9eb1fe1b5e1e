"""The shipped drafter's network and loss: dflash_mlx/drafter and dflash_mlx/train in PyTorch.

Of what the package can train, this has what config.json of dflash_mlx/smollm2 asks for: a DSpark
whose rows all draft, a Markov head without a gate, a head of its own, which is not trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .stored import IDS, Weights
from .target import SmolLM2, rotated

HEAD = "lm_head.weight"
FUSION = "fc.weight"
NOT_TRAINED = (HEAD, IDS)
RESIDUAL = ("o_proj", "down_proj")  # zeros there make a new layer change nothing


class Batch(NamedTuple):
    """Sequences with the blocks to learn, and the target's features.

    Attributes:
        tokens: [N, S].
        anchors: positions [N, A] of the tokens that blocks follow.
        ends: of their answers, [N, A]; 0 for a block without weight.
        taps: outputs of the tapped layers [N, S, K*D].
        choices: the target's likeliest next tokens [N, S].
        tops, shares: its likeliest tokens and their probabilities [N, S, T].
    """

    tokens: Tensor
    anchors: Tensor
    ends: Tensor
    taps: Tensor
    choices: Tensor
    tops: Tensor
    shares: Tensor


class Slots(NamedTuple):
    """What the blocks drafted, [N, A, B] each.

    Attributes:
        drafts: tokens.
        choices: the target's.
        text: the text's.
        inside: whether a slot is inside its answer.
        losses: of each slot.
        weights: of each slot, 0 after the first slot in which text and choice differ.
    """

    drafts: Tensor
    choices: Tensor
    text: Tensor
    inside: Tensor
    losses: Tensor
    weights: Tensor

    def loss(self) -> Tensor:
        """The weighted mean of the losses."""
        return (self.losses * self.weights).sum() / self.weights.sum().clamp(min=1e-6)

    def tau(self) -> Tensor:
        """1 + the number of correct slots before the first wrong one, averaged over blocks."""
        right = (self.drafts == self.choices) & (self.weights > 0)
        accepted = right.long().cumprod(dim=-1).sum(dim=-1)
        used = self.inside.any(dim=-1)
        return 1 + (accepted * used).sum() / used.sum().clamp(min=1)

    def accepted(self) -> Tensor:
        """How many tokens of each block decoding would keep, [N, A]."""
        right = (self.drafts == self.text) & self.inside
        return right.long().cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class Drafter:
    """The network. It has no weights: each call is given those that it uses.

    Attributes:
        config: config.json.
        target: the model, whose embedding the drafter reads.
        scales: the taps' root mean squares [K*D], by which they are divided in training.
    """

    config: dict[str, Any]
    target: SmolLM2
    scales: Tensor

    def __call__(self, weights: Weights, batch: Batch) -> Slots:
        """Draft all blocks of a batch, and compare them with the text and the target's choices."""
        block = self.config["block_size"]
        sequences, blocks = batch.anchors.shape
        rows = torch.arange(block, device=batch.tokens.device)
        slots = batch.anchors[..., None] + 1 + rows
        inside = slots < batch.ends[..., None]
        flat = slots.clamp(max=batch.tokens.shape[1] - 1).flatten(1)
        text = batch.tokens.gather(1, flat).view(slots.shape)
        choices = batch.choices.gather(1, flat - 1).view(slots.shape)
        first = batch.tokens.gather(1, batch.anchors)[..., None]
        before = torch.cat([first, text[..., :-1]], dim=-1)
        hidden = self._hidden(weights, batch, first)
        logits = F.linear(hidden, weights[HEAD]) + F.linear(
            F.embedding(before.flatten(0, 1), weights["markov_head.markov_w1.weight"]),
            weights["markov_head.markov_w2.weight"],
        )
        ids = weights[IDS] + torch.arange(len(weights[IDS]), device=rows.device)
        agrees = (choices == text).float().cumprod(dim=-1)
        reached = F.pad(agrees[..., :-1], (1, 0), value=1.0)
        decay = torch.exp(-rows / (block / 2))
        width = batch.tops.shape[-1]
        places = (flat - 1)[..., None].expand(-1, -1, width)
        losses, can_draft = slot_losses(
            logits.flatten(0, 1),
            ids=ids,
            choices=choices.flatten(),
            tops=batch.tops.gather(1, places).flatten(0, 1),
            shares=batch.shares.gather(1, places).float().flatten(0, 1),
        )
        weighted = inside * reached * decay
        return Slots(
            drafts=ids[logits.detach().argmax(dim=-1)].view(slots.shape),
            choices=choices,
            text=text,
            inside=inside,
            losses=(losses * can_draft).view(slots.shape),
            weights=weighted,
        )

    def _hidden(self, weights: Weights, batch: Batch, first: Tensor) -> Tensor:
        """Hidden states [N*A, B, D] of all blocks after the final norm."""
        mask = torch.full_like(first, self.config["dflash_config"]["mask_token_id"])
        tokens = torch.cat([first, *[mask] * (self.config["block_size"] - 1)], dim=-1)
        hidden = self.target.embed(tokens.flatten(0, 1))
        context = F.linear(batch.taps.float() / self.scales, weights[FUSION])
        context = self._normed(weights, "hidden_norm", context)
        for number in range(self.config["num_hidden_layers"]):
            layer = f"layers.{number}"
            normed = self._normed(weights, f"{layer}.input_layernorm", hidden)
            heads = self._attend(weights, f"{layer}.self_attn", normed, context, batch.anchors)
            hidden = hidden + F.linear(heads, weights[f"{layer}.self_attn.o_proj.weight"])
            normed = self._normed(weights, f"{layer}.post_attention_layernorm", hidden)
            gate = F.linear(normed, weights[f"{layer}.mlp.gate_proj.weight"])
            up = F.linear(normed, weights[f"{layer}.mlp.up_proj.weight"])
            hidden = hidden + F.linear(F.silu(gate) * up, weights[f"{layer}.mlp.down_proj.weight"])
        return self._normed(weights, "norm", hidden)

    def _attend(
        self, weights: Weights, name: str, rows: Tensor, context: Tensor, anchors: Tensor
    ) -> Tensor:
        """The heads' outputs [N*A, B, H*hd] of rows [N*A, B, D].

        A block sees the context [N, S, D] before its anchor, and all of itself.
        """
        sequences, blocks = anchors.shape
        places = anchors.flatten()[:, None] + torch.arange(rows.shape[1], device=rows.device)
        queries = self._heads(weights, f"{name}.q", rows, places) * self.config["head_dim"] ** -0.5
        near_keys = self._heads(weights, f"{name}.k", rows, places)
        near_values = self._heads(weights, f"{name}.v", rows)
        far_places = torch.arange(context.shape[1], device=rows.device)[None]
        keys = self._heads(weights, f"{name}.k", context, far_places)
        values = self._heads(weights, f"{name}.v", context)

        # [N*A, KV, G*B, hd] meet the block's keys; [N, KV, A*G*B, hd] the context's.
        queries = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        near = queries @ near_keys.transpose(-1, -2)
        wide = queries.unflatten(0, (sequences, blocks)).transpose(1, 2).flatten(2, 3)
        far = (wide @ keys.transpose(-1, -2)).unflatten(2, (blocks, -1))
        hidden = far_places >= anchors[..., None]
        far = far.masked_fill(hidden[:, None, :, None], torch.finfo(far.dtype).min)
        far = far.transpose(1, 2).flatten(0, 1)
        shares = torch.cat([far, near], dim=-1).softmax(dim=-1)
        far, near = shares.split([far.shape[-1], near.shape[-1]], dim=-1)
        wide = far.unflatten(0, (sequences, blocks)).transpose(1, 2).flatten(2, 3) @ values
        heads = wide.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1) + near @ near_values
        heads = heads.unflatten(2, (-1, rows.shape[1])).flatten(1, 2)
        return heads.transpose(1, 2).flatten(2)

    def _heads(
        self, weights: Weights, name: str, rows: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """Queries, keys or values [N, heads, L, hd] of rows [N, L, D].

        Those with places [N or 1, L] are normed and rotated.
        """
        heads = F.linear(rows, weights[f"{name}_proj.weight"])
        heads = heads.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)
        if places is None:
            return heads
        angles = places[:, None, :, None] * self._rates(rows)
        return rotated(
            self._normed(weights, f"{name}_norm", heads), cos=angles.cos(), sin=angles.sin()
        )

    def _rates(self, like: Tensor) -> Tensor:
        pairs = torch.arange(0, self.config["head_dim"], 2, device=like.device)
        rates = self.config["rope_theta"] ** (-pairs / self.config["head_dim"])
        return rates.repeat(2)

    def _normed(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.rms_norm(rows, weight.shape, weight, self.config["rms_norm_eps"])


def slot_losses(
    logits: Tensor, ids: Tensor, choices: Tensor, tops: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The losses of slots [M], and whether the target's choice in each can be drafted [M].

    A loss is half the cross entropy and half the KL divergence.

    Args:
        logits: of the tokens that can be drafted, [M, V'].
        ids: of these tokens, [V'] and ascending.
        choices: the target's [M].
        tops, shares: its likeliest tokens and their probabilities [M, T]. Those that can be
            drafted are normalized to 1.
    """

    def places(tokens: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
        return place, ids[place] == tokens

    label, can_draft = places(choices)
    top, can_draft_top = places(tops)
    total = logits.logsumexp(dim=-1, keepdim=True)
    entropy = (total - logits.gather(1, label[:, None]))[:, 0]
    log_q = logits.gather(1, top) - total
    p = shares * can_draft_top
    p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    divergence = (p * (p.clamp(min=1e-9).log() - log_q)).sum(dim=-1)
    return 0.5 * entropy + 0.5 * divergence, can_draft


def start_weights(
    config: dict[str, Any], weights: Weights, scales: Tensor, layers: int, seed: int
) -> tuple[dict[str, Any], Weights]:
    """The config and weights that training begins with.

    The fusion is for scaled taps; additional layers change nothing yet.

    Args:
        config, weights: of the shipped drafter.
        scales: of the taps [K*D].
        layers: how many the new drafter has, at least those of the shipped one.
        seed: of the new layers' weights.
    """
    before = config["num_hidden_layers"]
    config = config | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    started = weights | {FUSION: weights[FUSION] * scales}
    random = torch.Generator(scales.device).manual_seed(seed)
    for number in range(before, layers):
        for name in [name for name in weights if name.startswith("layers.0.")]:
            like = weights[name]
            if like.ndim == 1:
                new = torch.ones_like(like)
            elif any(part in name for part in RESIDUAL):
                new = torch.zeros_like(like)
            else:
                new = torch.empty_like(like).normal_(generator=random) * like.shape[1] ** -0.5
            started[name.replace("layers.0.", f"layers.{number}.")] = new
    return config, started
