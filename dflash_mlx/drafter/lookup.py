"""Drafting without a network: what followed the last time that the text read like this.

Rewriting a file, quoting code, repeating JSON: much of what a model writes stands in its prompt
already (prompt lookup decoding; arXiv 2304.04487 drafts so from references). The text so far is
indexed by its n-grams, a few lengths of them, each with its last place; where the text now ends as
it did there, what came after it is the draft. A token costs a dictionary entry a length, forgetting
it again the same, so conversations can go back.

How likely such a draft is right depends on how long the match is, and on the text. That is learnt
from every draft, verified or not, once the text has gone on past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from ..hindsight import Hindsight
from ..proposal import Proposal
from ..sharpness import matching

if TYPE_CHECKING:
    import mlx.core as mx

    from ..sampling import Sampler
    from ..targets import Target
    from ..targets.caches import Arrays

LENGTHS = (2, 3, 4, 8, 16)  # of the n-grams that are indexed, the shortest first: see `find`
MOST = 32  # tokens before a place that are compared with those before the end
WIDEST = 16  # rows of a draft
# How often slots are right after matches of 2-3, 4-7, 8-15, 16-31 and more tokens: first beliefs,
HOPES = (0.35, 0.6, 0.8, 0.9, 0.95)
HOPE_WEIGHT = 3.0  # and how many drafts they count for
LATER = 3  # slots, after which all are alike
MEMORY = 0.97  # a draft's weight against the next one's
UNSEEN = -1


class Index:
    """A text, and the last place of each of its n-grams.

    Attributes:
        tokens: the text.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in LENGTHS)
        self._before: list[tuple[int, ...]] = []  # by token: the places that it overwrote

    def add(self, token: int) -> None:
        """The text goes on by a token."""
        self.tokens.append(token)
        end, overwritten = len(self.tokens), []
        for length, places in zip(LENGTHS, self._places, strict=True):
            key = tuple(self.tokens[-length:])
            overwritten.append(places.get(key, UNSEEN))
            if end >= length:
                places[key] = end
        self._before.append(tuple(overwritten))

    def trim_to(self, count: int) -> None:
        """Forget all but the first `count` tokens."""
        while len(self.tokens) > count:
            before = self._before.pop()
            for length, places, place in zip(LENGTHS, self._places, before, strict=True):
                if len(self.tokens) < length:
                    continue
                key = tuple(self.tokens[-length:])
                if place == UNSEEN:
                    del places[key]
                else:
                    places[key] = place
            self.tokens.pop()

    def find(self, token: int) -> tuple[int, int]:
        """Where the text, gone on by a token, ended the same before: the place after that end.

        Returns it and the length of the match, (0, 0) where there is none of two tokens.
        """
        text, best = [*self.tokens[-MOST:], token], (0, 0)
        for length, places in zip(LENGTHS, self._places, strict=True):
            place = places.get(tuple(text[-length:]), UNSEEN)
            if len(text) < length or place == UNSEEN:
                break  # where fewer were never the same, more were not
            matched = length
            while matched < min(MOST, place, len(text)) and (
                self.tokens[place - matched - 1] == text[-matched - 1]
            ):
                matched += 1
            if matched > best[1]:
                best = place, matched
        return best

    def follow(self, place: int, token: int, count: int) -> list[int]:
        """The `count` tokens from a place on, the text gone on by a token and then by these."""
        drafted: list[int] = []
        for at in range(place, place + count):
            beyond = at - len(self.tokens)
            if beyond < 0:
                drafted.append(self.tokens[at])
            else:
                drafted.append(token if beyond == 0 else drafted[beyond - 1])
        return drafted


class Rates:
    """How often drafts after matches of each length were right; kept, it serves all requests."""

    def __init__(self) -> None:
        self._tried = [[0.0] * LATER for _ in HOPES]
        self._right = [[0.0] * LATER for _ in HOPES]

    def of(self, matched: int, slots: int) -> list[float]:
        """How likely each slot is right, those before it being, after a match of so many tokens."""
        at, rates, belief = _class(matched), [], HOPES[_class(matched)]
        for tried, right in zip(self._tried[at], self._right[at], strict=True):
            belief = (right + HOPE_WEIGHT * belief) / (tried + HOPE_WEIGHT)
            rates.append(belief)
        return [*rates, *[belief] * slots][:slots]

    def learn(self, matched: int, slots: int, right: int) -> None:
        """Take in a draft of so many slots, of which the first ones were right."""
        tried, correct = self._tried[_class(matched)], self._right[_class(matched)]
        for slot in range(min(right + 1, slots)):
            at = min(slot, LATER - 1)
            tried[at] = MEMORY * tried[at] + 1
            correct[at] = MEMORY * correct[at] + (slot < right)


class Lookup:
    """The drafter: what is learnt about its drafts, whatever the target."""

    tap_layers = ()
    identity = label = "lookup"
    block_size = WIDEST

    def __init__(self) -> None:
        self.rates = Rates()

    def apart(self) -> Lookup:
        """The same, going on from what is known so far."""
        return deepcopy(self)

    def start(self, target: Target, sampler: Sampler) -> LookupSession:
        """Begin one request."""
        return LookupSession(self.rates)


class LookupSession:
    """One request's text, and the drafts from it. Nothing here waits for the device."""

    only_foresees = True  # it has no other drafts than those that `foresee` speaks of

    def __init__(self, rates: Rates) -> None:
        self._rates, self._index = rates, Index()
        self._found: tuple[int, int, int] = (0, 0, 0)  # place, match and anchor of this round
        self._waiting: Hindsight[tuple[int, list[int]]] = Hindsight()

    @property
    def position(self) -> int:
        """Tokens that were read."""
        return len(self._index.tokens)

    def read(self, tokens: Sequence[int]) -> None:
        """Take in newly committed tokens, in order."""
        for token in tokens:
            self._index.add(token)
        for (matched, drafted), text in self._waiting.commit(tokens):
            right = matching(drafted, text[1:])  # the first of them is the anchor
            self._rates.learn(matched, len(drafted), right)

    def extend(self, taps: mx.array) -> None:
        """Features are not needed."""

    def extend_by(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Nor are those of a round."""

    def foresee(self, anchor: int, width: int) -> list[float]:
        """How likely each slot of a draft of at most `width` rows is right, those before it being.

        Empty where the text has no such place. The draft itself costs nothing.
        """
        place, matched = self._index.find(anchor)
        self._found = place, matched, anchor
        slots = min(width, WIDEST) - 1
        if not matched or slots < 1:
            return []
        self._waiting.add(slots + 1, (matched, self._index.follow(place, anchor, slots)))
        return self._rates.of(matched, slots)

    def propose_foreseen(self, anchor: int, width: int) -> Proposal:
        """The draft that `foresee` spoke of last, of at most `width` rows."""
        place, matched, of = self._found
        assert of == anchor, "foresee this anchor first"
        slots = min(width, WIDEST) - 1 if matched else 0
        return Proposal([anchor, *self._index.follow(place, anchor, slots)])

    def propose(self, anchor: int, width: int) -> Proposal:
        """What followed the last time; the anchor alone where that is not known."""
        rows = 1 + len(self.foresee(anchor, width))
        return self.propose_foreseen(anchor, rows)

    can_trim = True

    def resume(self, sampler: Sampler) -> None:
        """Go on with another request over the same text."""
        self._waiting = Hindsight()

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self._index.trim_to(position)
        self._waiting = Hindsight()

    def checkpoint(self) -> int:
        """This state, to come back to."""
        return self.position

    def rewind(self, checkpoint: int) -> None:
        """Forget all tokens since the checkpoint."""
        self.trim_to(checkpoint)

    def rows(self, start: int, end: int) -> Arrays:
        """None: the text is all it needs."""
        return {}

    def state(self) -> Arrays:
        """None."""
        return {}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Nothing to do: the text is read."""


def _class(matched: int) -> int:
    """2-3 tokens, 4-7, 8-15, 16-31, more."""
    return min(max(matched.bit_length() - 2, 0), len(HOPES) - 1)
