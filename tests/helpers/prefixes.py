"""Sessions without a model, for tests of the prefix cache: a row is a hash of all tokens up to it.

So a wrong parent, block border or checkpoint shows in the rows.
"""

import mlx.core as mx
import mlx.nn as nn

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import SupportsSharing
from dflash_mlx.sampling import Sampler

CHUNK = 4


def hashes(ids, start=0):
    """The rows of tokens; `start` is the row before them."""
    values = []
    value = start
    for token in ids:
        value = (value * 31 + token + 1) % 2**31
        values.append(value)
    return values


class Session(SupportsSharing):
    """A session of a target or a drafter: rows, and a state if it cannot be trimmed."""

    intact = True
    is_recurrent = False
    tap_layers = ()

    def __init__(self, can_trim=True, width=1, kv_bits=None):
        self.can_trim = can_trim
        self.kv_bits = kv_bits
        self.width = width
        self.values = []

    @property
    def position(self):
        return len(self.values)

    def extend(self, taps, kept=None, tokens=()):
        raise NotImplementedError

    propose = extend

    def take(self, ids):
        self.values += hashes(ids, self.values[-1] if self.values else 0)
        rows = mx.broadcast_to(mx.array(self.values)[:, None], (self.position, self.width))
        self._all = mx.contiguous(rows)  # a slice keeps all of this array in memory

    def dry_run(self, taps):
        """Read tokens as a dry run does: a number of them, or features of that many."""
        tokens = taps if isinstance(taps, int) else taps.shape[1]
        self.take([0] * tokens)
        return mx.zeros((1, tokens, 0))

    def rows(self, start, end):
        return {"0.rows": self._all[start:end]}

    def state(self):
        return {} if self.can_trim else {"0.state": mx.array(self.values[-1:])}

    def trim_to(self, position):
        del self.values[position:]
        self._all = self._all[:position]

    def restore(self, position, rows, state, room):
        pieces = [piece["0.rows"][:, 0] for piece in rows if "0.rows" in piece]
        self.values = mx.concatenate(pieces).tolist()
        assert self.position == position
        assert self.can_trim or state["0.state"].tolist() == self.values[-1:]
        self._all = mx.broadcast_to(mx.array(self.values)[:, None], (position, self.width))


class Target:
    """A target with all that the cache uses; `seed` determines its weights."""

    tokenizer = None

    def __init__(self, can_trim=True, width=1, seed=0):
        self.can_trim = can_trim
        self.width = width
        self.config = {}
        self.model = nn.Linear(2, 2, bias=False)
        self.model.weight = mx.random.normal((2, 2), key=mx.random.key(seed))

    def start(self, tap_layers=(), kv_bits=None):
        return Session(self.can_trim, self.width, kv_bits)


class Drafter:
    tap_layers = ()

    def __init__(self, can_trim=True):
        self.can_trim = can_trim

    def start(self, target, sampler):
        return Session(self.can_trim)


def store(target, drafter=None, **settings):
    """A prefix store with small blocks and much memory."""
    settings = {"memory": 2**30, "chunk": CHUNK, "stride": 4 * CHUNK, "disk_left": 0} | settings
    return dm.PrefixStore(target, drafter or Drafter(), **settings)


def request(store, prompt, answer=(), step=8, kv_bits=None, salt="", ends=()):
    """Read a prompt and an answer as `Conversation` does, and store them.

    Args:
        step: the most tokens of a forward.
        ends: positions in the prompt where other prompts branch.

    Returns the number of stored tokens that the prompt continued from, after checking their rows.
    """
    target, drafter, reused = store.open(prompt, Sampler(), kv_bits=kv_bits, salt=salt)
    for session in (target, drafter):
        assert session.values == hashes(prompt[:reused])
    assert reused < len(prompt)
    stops = store.checkpoint_positions(target, drafter, prompt, ends, salt)
    keys = store.keys(kv_bits=kv_bits, salt=salt)
    for stop in (*stops, len(prompt)):
        while target.position < stop:
            chunk = prompt[target.position : min(stop, target.position + step)]
            target.take(chunk)
            drafter.take(chunk)
            store.insert(
                target,
                drafter=drafter,
                keys=keys,
                ids=prompt[: target.position],
                checkpoint=target.position in stops,
            )
    text = [*prompt, *answer[:-1]]  # the last token of an answer is never read
    target.take(text[len(prompt) :])
    drafter.take(text[len(prompt) :])
    store.insert(target, drafter=drafter, keys=keys, ids=text, checkpoint=True)
    return reused
