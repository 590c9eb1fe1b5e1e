"""Gemma 4's assistants, which attend to the target's keys, and drafters with Gemma 4's layers."""

import json
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import family_target, random_prompt
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from numpy_layers import attend, rms, rotate
from pairs import ASSISTANT, DSPARK, GEMMA4, ORDERED, gemma4
from pairs import assistant as pair

import dflash_mlx as dm
from dflash_mlx.drafter.gemma4_assistant import Gemma4Assistant
from dflash_mlx.errors import IncompatibleDrafterError, WeightsError
from dflash_mlx.loading.drafter_loader import DraftSource, drop_copies, open_drafter
from dflash_mlx.loading.folder import Folder
from dflash_mlx.subclassing import override

# Gemma 4's assistant in numpy, written from public code by somebody who had not seen this package.
#
# Sources: transformers' gemma4_assistant, gemma4 and SinglePositionMultiTokenCandidateGenerator;
# vllm/model_executor/models/gemma4_mtp.py and vllm/v1/spec_decode/gemma4.py.
#
# The target has read n tokens; the one after them is the anchor. Where the two disagree:
#
# - Position of the queries: vLLM n - 1, that of the hidden state; transformers n. Here a parameter.
# - Keys in the window: vLLM the newest `sliding_window`; transformers' mask lets one more through.
# - Rows of keys: vLLM n; transformers n + 1, which after a rejection has a rejected token's row.

F = np.float32
ROPE = {  # transformers' defaults: theta, and the share of the dimensions that are rotated
    "sliding_attention": (10_000.0, 1.0),
    "full_attention": (1_000_000.0, 0.25),
}


def gelu(x):
    return F(0.5) * x * (F(1) + np.tanh(F(np.sqrt(2 / np.pi)) * (x + F(0.044715) * x**3)))


class Oracle:
    """An assistant: weights by their published names, its config, the target's unscaled embedding.

    `swapped` plants a mistake: the input is [hidden, embedding], not [embedding, hidden].
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        embedding: np.ndarray,
        *,
        swapped: bool = False,
    ) -> None:
        self.w = weights
        self.config = config
        self.embedding = embedding
        self.swapped = swapped
        self.text = config["text_config"]
        self.eps = config["text_config"].get("rms_norm_eps", 1e-6)

    def norm(self, name, x):
        return rms(x, self.w[f"{name}.weight"], self.eps)

    def layer(self, index, x, shared, position):
        name = f"model.layers.{index}."
        kind = self.text["layer_types"][index]
        keys, values = shared[kind]
        if kind == "sliding_attention":
            window = self.text["sliding_window"]
            keys = keys[:, -window:]
            values = values[:, -window:]
        heads = self.text["num_attention_heads"]
        theta, share = ROPE[kind]
        queries = self.w[f"{name}self_attn.q_proj.weight"] @ self.norm(f"{name}input_layernorm", x)
        queries = self.norm(f"{name}self_attn.q_norm", queries.reshape(1, heads, -1))
        half = queries.shape[-1] // 2
        frequencies = np.where(
            np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0
        )
        queries = rotate(queries, [position], frequencies)
        keys = keys.transpose(1, 0, 2)
        values = values.transpose(1, 0, 2)
        out = attend(queries, keys, values, True, 1.0)[0]
        out = self.w[f"{name}self_attn.o_proj.weight"] @ out
        x = x + self.norm(f"{name}post_attention_layernorm", out)
        out = self.norm(f"{name}pre_feedforward_layernorm", x)
        gate = self.w[f"{name}mlp.gate_proj.weight"]
        up = self.w[f"{name}mlp.up_proj.weight"]
        down = self.w[f"{name}mlp.down_proj.weight"]
        out = down @ (gelu(gate @ out) * (up @ out))
        x = x + self.norm(f"{name}post_feedforward_layernorm", out)
        return x * self.w[f"{name}layer_scalar"]

    def logits(self, x):
        table = self.w["model.embed_tokens.weight"]
        if not self.config.get("use_ordered_embeddings"):
            return table @ x
        best = np.argsort(-(self.w["masked_embedding.centroids.weight"] @ x))
        clusters = self.w["masked_embedding.token_ordering"].reshape(len(best), -1)
        ids = clusters[best[: self.config["centroid_intermediate_top_k"]]].flatten()
        logits = np.full(len(table), -np.inf, F)
        logits[ids] = table[ids] @ x
        return logits

    def draft(
        self,
        anchor: int,
        hidden: np.ndarray,
        shared: Mapping[str, Sequence[np.ndarray]],
        count: int,
        position: int,
    ) -> tuple[list[int], np.ndarray]:
        """Greedy drafts and their logits [count, V].

        `shared` holds the target's keys and values [KV, S, dim] by kind of layer.
        """
        drafts = [anchor]
        rows = []
        for _ in range(count):
            embedded = self.embedding[drafts[-1]] * F(self.config["backbone_hidden_size"] ** 0.5)
            both = [hidden, embedded] if self.swapped else [embedded, hidden]
            x = self.w["pre_projection.weight"] @ np.concatenate(both)
            for index in range(len(self.text["layer_types"])):
                x = self.layer(index, x, shared, position)
            x = self.norm("model.norm", x)
            hidden = self.w["post_projection.weight"] @ x
            rows.append(self.logits(x))
            drafts.append(int(rows[-1].argmax()))
        return drafts[1:], np.stack(rows)


def hidden_and_keys(target, tokens):
    """The last hidden state of `tokens`, and keys and values by kind of layer, from mlx-lm."""
    model = target.model.language_model
    caches = model.make_cache()
    kinds = model.args.layer_types
    hidden = model.model(mx.array([tokens]), cache=caches)[:, -1:]
    shared = {}
    last_layers = {kind: index for index, kind in enumerate(kinds[: len(caches)])}
    for kind, last in last_layers.items():
        cache = caches[last]
        if kind == "full_attention":
            keys = cache.keys[:, :, : len(tokens)]
            values = cache.values[:, :, : len(tokens)]
        else:  # the window's 32 rows, from a ring buffer
            keys = cache._temporal_order(cache.keys)[:, :, -32:]
            values = cache._temporal_order(cache.values)[:, :, -32:]
        shared[kind] = [np.array(keys[0]), np.array(values[0])]
    return hidden, shared


# The published combinations of a target and changes to its assistant's config.
PAIRS = [("gemma4_dense", {}), ("gemma4_E4B-like", ORDERED)]


def draft_steps(target, assistant, count):
    """Yields texts, and our drafts and logits after them.

    After a prompt longer than the window, and after steps that committed some of their rows.
    """
    prompt = random_prompt(40, 2)
    session = target.start(assistant.tap_layers)
    drafting = assistant.start(target)
    for _, taps in session.prefill(prompt[:-1]):
        done = drafting.position
        drafting.extend(taps, tokens=prompt[done : done + taps.shape[1]])
    text = list(prompt)
    for new in ([7, 9], [3], [4, 5, 6]):
        draft = drafting.draft(text[-1], count + 1)
        yield list(text), draft.tokens.tolist(), np.array(draft.scores)
        _, taps = session.verify(dm.Proposal([text[-1], *new, 1, 2]))
        kept = list(range(len(new)))
        session.commit(kept)
        drafting.extend(taps, kept, [text[-1], *new][: len(new)])
        text += new


def oracle_draft(target, assistant, changes, text, *, shift=0, swapped=False):
    """The oracle's drafts and logits after a text.

    `shift` and `swapped` plant mistakes: queries at a later position, or a swapped input.
    """
    weights = {name: np.array(value) for name, value in tree_flatten(assistant.parameters())}
    embedding = np.array(target.model.language_model.model.embed_tokens.weight)
    hidden, shared = hidden_and_keys(target, text[:-1])
    oracle = Oracle(weights, ASSISTANT | changes, embedding, swapped=swapped)
    return oracle.draft(
        anchor=text[-1],
        hidden=np.array(hidden[0, 0]),
        shared=shared,
        count=5,
        position=len(text) - 2 + shift,
    )


@pytest.mark.parametrize(("name", "changes"), PAIRS)
def test_drafts_and_logits_are_the_oracles(name, changes):
    target, assistant = pair(name, **changes)
    for text, drafts, logits in draft_steps(target, assistant, 5):
        expected_drafts, expected_logits = oracle_draft(target, assistant, changes, text)
        assert drafts == expected_drafts and logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mistake", [{"swapped": True}, {"shift": 1}])
def test_a_mistake_in_the_oracle_would_change_its_drafts(mistake):
    """A control of the test above: the drafts depend on the order of inputs and on positions."""
    target, assistant = pair("gemma4_dense")
    drafts = []
    mistaken_drafts = []
    for text, tokens, _ in draft_steps(target, assistant, 5):
        drafts.append(tokens)
        mistaken_drafts.append(oracle_draft(target, assistant, {}, text, **mistake)[0])
    assert mistaken_drafts != drafts


def test_a_draft_is_right_while_another_thread_verifies_a_tree():
    """Both call the target's layers, but only that thread's rows are rotated by a tree's depths."""
    target, assistant = pair("gemma4_dense")
    prompt = random_prompt(40, 2)
    inside = Event()
    leave = Event()
    sessions = [assistant.start(target), assistant.start(target)]
    for _, taps in target.start(assistant.tap_layers).prefill(prompt[:-1]):
        for session in sessions:
            start = session.position
            session.extend(taps, tokens=prompt[start : start + taps.shape[1]])
    expected = sessions[0].draft(prompt[-1], 6).tokens.tolist()

    def waiting(call_original):
        def call(layer, *args, **settings):
            inside.set()
            leave.wait(60)
            return call_original(layer, *args, **settings)

        return call

    override(target.layers[0], waiting)
    tree = dm.Proposal([1, 2, 3], (-1, 0, 0))
    verifying = Thread(target=lambda: target.start().verify(tree))
    verifying.start()
    inside.wait(60)
    assert sessions[1].draft(prompt[-1], 6).tokens.tolist() == expected
    leave.set()
    verifying.join()


def test_checkpoints_are_read_by_their_published_names(tmp_path):
    target, assistant = pair("gemma4_dense", **ORDERED)
    (tmp_path / "config.json").write_text(json.dumps(ASSISTANT | ORDERED))
    weights = dict(tree_flatten(assistant.parameters()))
    assert "model.layers.3.self_attn.q_proj.weight" in weights
    assert "masked_embedding.token_ordering" in weights
    file = str(tmp_path / "model.safetensors")
    mx.save_safetensors(file, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    source = DraftSource.of("assistant", Folder(tmp_path), target.config)
    drafter = open_drafter(source, target, None, None)
    assert dict(tree_flatten(drafter.parameters())).keys() == weights.keys()
    del weights["post_projection.weight"]
    mx.save_safetensors(file, weights)
    source = DraftSource.of("assistant", Folder(tmp_path), target.config)
    with pytest.raises(WeightsError, match="post_projection.weight is missing"):
        open_drafter(source, target, None, None)
    with pytest.raises(IncompatibleDrafterError, match="is not a Gemma 4 model"):
        Gemma4Assistant(ASSISTANT, family_target("qwen3"))


# Drafters with Gemma 4's layers


@pytest.mark.parametrize("shared", [True, False])
def test_a_drafters_layer_computes_what_mlx_lms_full_attention_layer_does(shared):
    """Whether keys and values share a projection or not."""
    _, drafter = gemma4(**DSPARK, attention_k_eq_v=shared)
    ours = drafter.layers[1]
    config = {**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    arguments = gemma4_text.ModelArgs.from_dict(config | {"attention_k_eq_v": shared})
    theirs = gemma4_text.DecoderLayer(arguments, 1)
    theirs.load_weights(tree_flatten(ours.parameters()), strict=False)
    assert (
        dict(tree_flatten(theirs.parameters())).keys()
        <= dict(tree_flatten(ours.parameters())).keys()
    )
    x = mx.random.normal((1, 9, 64))
    expected = theirs(x, mask=create_attention_mask(x, None), cache=KVCache())[0]
    attention = ours.self_attn
    attention.causal = True

    def attend(hidden):
        keys, values = attention.keys_values(hidden, 0)
        return attention.attend(attention.queries(hidden, 0), keys, values)

    output = ours(x, attend)
    assert mx.abs(output - expected).max() < 1e-5


def test_copies_of_the_targets_scaled_embedding_are_dropped():
    target, drafter = gemma4(**DSPARK)
    ids = mx.arange(256)[None]
    drafter.embed_tokens.weight = target.embed(ids)[0] / target.hidden_size**0.5
    before = drafter.embed(ids, target)
    assert "embedding" in drop_copies(drafter, target)
    assert mx.allclose(before, drafter.embed(ids, target), rtol=1e-4)
