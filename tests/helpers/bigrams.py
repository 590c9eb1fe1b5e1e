"""Targets without a model: one of bigrams, and one with a given text.

In a bigram target, the next token depends on the last token only. So every probability is known,
and thousands of samples are quick to draw.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter.candidates import CandidateTokens, log_softmax, read_candidates
from dflash_mlx.drafter.draft_tree import DraftTree
from dflash_mlx.drafter.protocol import SupportsTrees
from dflash_mlx.proposal import Proposal


class TargetWithoutModel:
    """A target without a model, whose tokens have no text. It reads one request at a time."""

    name = "without a model"
    context_length = 2**31
    position = 0
    supports_trees = True
    can_trim = True
    intact = True
    can_pipeline = True
    slot = None
    kernel_plan = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        detokenizer = SimpleNamespace(
            add_token=lambda token: None, finalize=lambda: None, last_segment=""
        )
        self.tokenizer = SimpleNamespace(detokenizer=detokenizer, eos_token_ids=())

    def start(self, tap_layers=(), kv_bits=None):
        session = copy.copy(self)
        session.position = 0
        return session

    def check_trees(self):
        pass

    def read(self, spans):
        [span] = spans
        logits, taps = span.session.read_prompt(span.proposal.tokens)
        return [(logits if span.ends_prompt else None, taps)]

    def forward(self, rows, logits="all"):
        [span] = rows.spans
        return span.session.verify(span.proposal)

    def leave_slot(self):
        pass

    def chunk_end(self, end, stops=(), most=None):
        return end

    def commit(self, kept):
        self.position += len(kept)


class BigramTarget(TargetWithoutModel):
    """A target whose logits after a token are its row of a table [V, V]. It needs no caches."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__(len(table))
        self.table = mx.array(table.astype(np.float32))

    def read_prompt(self, tokens):
        self.position += len(tokens)
        last = mx.array(tokens[-1:], mx.int32)
        return self.table[last], mx.zeros((1, len(tokens), 0))

    def verify(self, proposal):
        tokens = mx.array(proposal.tokens)
        return self.table[tokens], mx.zeros((1, len(proposal), 0))


class ScriptedTarget(TargetWithoutModel):
    """A target whose greedy text after `prompt` is `answer`.

    It replaces a model that copies parts of its prompt, which no model of a test's size does.
    """

    num_layers = 4
    hidden_size = 8
    can_pipeline = False  # it reads its rows on the host

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.text = [*prompt, *answer]
        self.rows: list[int] = []  # the number of rows of each forward

    def read_prompt(self, tokens):
        self.position += len(tokens)
        logits = np.zeros((1, self.vocab_size), np.float32)
        logits[0, self.text[self.position]] = 20.0
        return mx.array(logits), mx.zeros((1, len(tokens), 0))

    def verify(self, proposal):
        tokens = np.array(proposal.tokens).tolist()
        logits = np.zeros((len(tokens), self.vocab_size), np.float32)
        for row, path in enumerate(proposal.paths()):
            position = self.position + len(path) + 1  # that of the token after the path
            tokens_of_path = [tokens[node] for node in path]
            is_right = tokens_of_path == self.text[self.position + 1 : position]
            next_token = self.text[position] if is_right and position < len(self.text) else 0
            logits[row, next_token] = 20.0
        self.rows.append(len(tokens))
        return mx.array(logits), mx.zeros((1, len(tokens), 0))


class BigramDrafter:
    """Drafts slot j from the distribution j tokens after the anchor, not knowing the slots before.

    That is the anchor's row of the j-th power of the matrix of probabilities.
    """

    tap_layers = ()

    def __init__(self, table: np.ndarray) -> None:
        self.probabilities = softmax(table)

    def start(self, target, sampler):
        self.sampler = sampler
        return self

    def extend(self, taps):
        pass

    def propose(self, anchor, width):
        if width == 1:
            return Proposal([anchor])
        distributions = self.distributions(anchor, width - 1).astype(np.float32)
        drafts = self.sampler.draft(mx.log(mx.array(distributions)))
        return Proposal(mx.concatenate([mx.array([anchor]), drafts.astype(mx.int32)]))

    def distributions(self, anchor, slots):
        """Probabilities [slots, V] of the tokens after the anchor."""
        row = np.eye(len(self.probabilities))[anchor]
        rows = []
        for _ in range(slots):
            row = row @ self.probabilities
            rows.append(row)
        return np.array(rows)


class TreeBigrams(BigramDrafter, SupportsTrees):
    """Drafts trees from the same distributions as chains; every token is a candidate."""

    drafts_trees = True

    def extend(self, taps, kept=None, tokens=()):
        pass

    def propose_tree(self, anchor, rows, width):
        log_probs = np.log(self.distributions(anchor, width - 1)).astype(np.float32)
        scores, _ = self.sampler.draft_scores(mx.array(log_probs))
        tokens = mx.broadcast_to(mx.arange(scores.shape[1]), scores.shape)
        candidates = CandidateTokens(tokens, log_softmax(scores)[:, None])
        return DraftTree(anchor, *read_candidates([candidates])[0], rows)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis, in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
