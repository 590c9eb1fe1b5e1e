"""Prompt lookup decoding: drafts the tokens that followed the last time the text read like this.

Rewriting a file, quoting code or repeating JSON mostly copies text that stands in the prompt
already. An index holds the last place of each n-gram of the text. When the text ends as it did at
some earlier place, the tokens after that place are the draft. A token costs one dictionary entry
per n-gram length. Trimming restores the entries, so conversations can go back.

The acceptance rate of a lookup depends on the length of the match and on the text. Each request
learns it from all its drafts, verified or not: once the text has passed a draft, both are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..proposal import Proposal

# The lengths of the indexed n-grams, shortest first: `Index.find` stops at the first failure.
NGRAM_LENGTHS = (2, 3, 4, 8, 16)
# Matches are measured up to this length.
MAX_MATCH = 32
# A draft has at most this many rows, the anchor included.
BLOCK_SIZE = 16
# The expected acceptance rates after matches of 2-3, 4-7, 8-15, 16-31 and more tokens.
PRIOR_RATES = (0.35, 0.6, 0.8, 0.9, 0.95)
# A prior rate counts as much as this many drafts.
PRIOR_WEIGHT = 3.0
# The first slots have a rate each; later slots share the last rate.
RATED_SLOTS = 3
# The weight of older drafts shrinks by this factor with every new one.
DECAY = 0.97
# Stands for the place of an n-gram that the text did not have before.
UNSEEN = -1


class Index:
    """A text, and the last place of each of its n-grams.

    Attributes:
        tokens: the text.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # by n-gram, of all lengths
        self._before: list[list[int]] = []  # per token: the places that it overwrote

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            overwritten = []
            for length in NGRAM_LENGTHS:
                if end >= length:
                    key = tuple(self.tokens[-length:])
                    overwritten.append(self._places.get(key, UNSEEN))
                    self._places[key] = end
            self._before.append(overwritten)

    def trim_to(self, count: int) -> None:
        """Forget all but the first `count` tokens."""
        while len(self.tokens) > count:
            # The first tokens end fewer n-grams than there are lengths.
            for length, place in zip(NGRAM_LENGTHS, self._before.pop(), strict=False):
                key = tuple(self.tokens[-length:])
                if place == UNSEEN:
                    del self._places[key]
                else:
                    self._places[key] = place
            self.tokens.pop()

    def find(self, token: int) -> tuple[int, int]:
        """Find the longest earlier match of the text's end, which includes `token`.

        Returns the place after the match and its length; (0, 0) if fewer than two tokens match.
        """
        text = [*self.tokens[-MAX_MATCH:], token]
        best = (0, 0)
        for length in NGRAM_LENGTHS:
            place = self._places.get(tuple(text[-length:]), UNSEEN)
            if len(text) < length or place == UNSEEN:
                break  # a longer match would contain this one
            matched = length
            # Compare the tokens in front of both matches.
            while matched < min(MAX_MATCH, place, len(text)) and (
                self.tokens[place - matched - 1] == text[-matched - 1]
            ):
                matched += 1
            if matched > best[1]:
                best = (place, matched)
        return best

    def follow(self, place: int, token: int, count: int) -> list[int]:
        """Copy `count` tokens from a place on.

        Beyond the text's end, the copy goes on with `token` and with its own beginning.
        """
        drafted: list[int] = []
        for position in range(place, place + count):
            beyond = position - len(self.tokens)
            if beyond < 0:
                drafted.append(self.tokens[position])
            else:
                drafted.append(token if beyond == 0 else drafted[beyond - 1])
        return drafted


class LookupRates:
    """Acceptance rates of lookup drafts, per length of the match and per slot."""

    def __init__(self) -> None:
        # How many drafts were tried and how many were right, by the match's length class and slot.
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def expected(self, matched: int, slots: int) -> list[float]:
        """The rate of each slot after a match of 2 tokens or more.

        Each rate assumes that the slots before it are right.
        """
        length = _length_class(matched)
        rates: list[float] = []
        rate = PRIOR_RATES[length]
        for slot in range(slots):
            if slot < RATED_SLOTS:
                tried, right = self._counts.get((length, slot), (0.0, 0.0))
                rate = (right + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def learn(self, matched: int, slots: int, right: int) -> None:
        """Record a draft of `slots` slots, of which the first `right` ones were right."""
        length = _length_class(matched)
        for slot in range(min(right + 1, slots)):
            key = (length, min(slot, RATED_SLOTS - 1))
            tried, correct = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (DECAY * tried + 1, DECAY * correct + (slot < right))


def _length_class(matched: int) -> int:
    """The class of a match by its length: 2-3 tokens are 0, 4-7 are 1, and so on."""
    return min(matched.bit_length() - 2, len(PRIOR_RATES) - 1)


class PromptLookup:
    """Drafts for one request from its own text."""

    def __init__(self) -> None:
        self._index = Index()
        self._rates = LookupRates()
        self._last_match = (0, 0, 0)  # place, length and anchor
        # Drafts that the text has not passed: the match's length and the draft, by place.
        self._drafts: dict[int, tuple[int, list[int]]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, and learn from the drafts that it has passed."""
        self._index.extend(tokens)
        text = self._index.tokens
        for place, (matched, draft) in list(self._drafts.items()):
            if len(text) >= place + len(draft):
                right = 0
                while right < len(draft) and draft[right] == text[place + right]:
                    right += 1
                self._rates.learn(matched, len(draft), right)
                del self._drafts[place]

    def trim_to(self, count: int) -> None:
        """Forget all but the first `count` tokens, and the drafts that wait for more of them."""
        self._index.trim_to(count)
        self._drafts = {}

    def rates(self, anchor: int, width: int) -> list[float]:
        """The expected acceptance rate of each slot of a draft of at most `width` rows.

        Empty if the text has no earlier match.
        """
        place, matched = self._index.find(anchor)
        self._last_match = (place, matched, anchor)
        slots = min(width, BLOCK_SIZE) - 1
        if not matched or slots < 1:
            return []
        begin = len(self._index.tokens) + 1  # after the anchor
        self._drafts[begin] = (matched, self._index.follow(place, anchor, slots))
        return self._rates.expected(matched, slots)

    def propose(self, anchor: int, width: int) -> Proposal:
        """Propose the draft that `rates` rated last, with at most `width` rows."""
        place, matched, rated_anchor = self._last_match
        assert rated_anchor == anchor, "call rates with this anchor first"
        slots = min(width, BLOCK_SIZE) - 1 if matched else 0
        return Proposal([anchor, *self._index.follow(place, anchor, slots)])
