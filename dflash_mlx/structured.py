"""Answers that fit a JSON schema: a grammar as one more logits processor.

    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    dm.generate(target, drafter, "What is 37 + 48?", logits_processors=[JsonSchema(target, schema)])

llguidance (the `structured` extra) runs the grammar. It applies to each row with its own path, so
drafted tokens fit the schema too and are accepted as often as others. It needs token ids on the
host, so a step waits for its drafts, and once more for each that does not fit (`constraints`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from .errors import MissingDependencyError, SettingsError
from .validation import brief, error_text

if TYPE_CHECKING:
    from .targets import Target


# One space between parts: small models would fill an answer with white space if they could.
SPACES: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Around the reason in an error about a schema in a grammar of ours: its place and the grammar.
_PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *\d+ \| (?s:.*)")


class GrammarTokens:
    """A target's vocabulary for llguidance, for any number of grammars.

    Raises `MissingDependencyError` if llguidance is not installed.
    """

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError as error:
            raise MissingDependencyError.of("llguidance is not installed", "structured") from error
        vocabulary = target.tokenizer.backend_tokenizer
        ends = target.tokenizer.eos_token_ids
        # Some fine-tunes name an end that the tokenizer does not have; llguidance refuses those.
        self.eos_ids = frozenset(end for end in ends if end >= 0 and vocabulary.id_to_token(end))
        self._tokenizer = LLTokenizer(
            vocabulary.to_str(),
            n_vocab=target.vocab_size,
            eos_token=sorted(self.eos_ids),
        )
        self._matchers = LLMatcher

    def of_schema(self, schema: Mapping[str, Any]) -> str:
        """The grammar of a JSON schema, laid out with `SPACES` unless its own `x-guidance` differs.

        Raises `SettingsError` for a schema that is not a JSON object.
        """
        if not isinstance(schema, Mapping):
            raise SettingsError(
                f"The JSON schema must be a dict, as json.loads makes one, not {brief(schema)}."
            )
        try:
            text = json.dumps({"x-guidance": SPACES, **schema}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(f"The JSON schema cannot be JSON: {error_text(error)}.") from error
        return str(self._matchers.grammar_from_json_schema(text))

    def of_text(self, text: str, added: Mapping[str, int]) -> list[int]:
        """Token ids of a text, in which the `added` tokens are tokens of their own.

        They spell the text byte for byte, which the tokenizer's own may not: SentencePiece begins a
        text with a space.
        """
        names = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        found: list[int] = []
        for part in re.split(f"({names})", text) if names else [text]:
            found += [added[part]] if part in added else self._tokenizer.greedy_tokenize(part)
        return found

    def of_lark(self, lark: str) -> str:
        """The grammar of a text in llguidance's dialect of Lark."""
        return str(self._matchers.grammar_from_lark(lark))

    def matcher(self, grammar: str, what: str) -> Any:
        """A matcher for one text. Raises `SettingsError`, which calls the grammar `what`."""
        problem = self._matchers.validate_grammar(grammar, self._tokenizer)
        matcher = self._matchers(self._tokenizer, grammar)
        if not problem:
            matcher.compute_logit_bias()
            problem = "no text fits it" if matcher.is_error() else ""
        if problem:
            # All lines: for a regular expression the last one has the reason.
            raise SettingsError(
                f"{what} cannot be used: {' '.join(_PLACE.sub('', problem).split())}"
            )
        return matcher


class Grammar:
    """A logits processor that allows only tokens that fit a grammar.

    It serves one request, and takes the first history for that request's prompt. As the last of the
    processors it is used as a `TokenConstraint`, for all rows of a step at once.

    Args:
        tokens: the target's.
        grammar: one of llguidance's.
        what: its name in an error.
        begun: token ids that the prompt ends with and that the text begins with.

    Raises `SettingsError` for an invalid grammar, one that llguidance does not support, or one that
    `begun` does not fit.
    """

    def __init__(
        self,
        tokens: GrammarTokens,
        grammar: str,
        what: str = "The grammar",
        begun: Sequence[int] = (),
    ) -> None:
        self._eos_ids = tokens.eos_ids
        self._begun = list(begun)
        self._what = what
        self._compiled = partial(tokens.matcher, grammar, what)
        self._matcher = self._new_matcher()
        self._prompt: int | None = None
        self._read: list[int] = []  # the tokens in the matcher

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V] with -inf for tokens that may not follow the history [H]."""
        if self._prompt is None:
            self._prompt = len(tokens)
        answer: Any = tokens[self._prompt :].tolist()
        allowed = self.allowed(answer)
        return logits if allowed is None else mx.where(mx.array(allowed), logits, -mx.inf)

    @property
    def warnings(self) -> list[str]:
        """What the grammar does not hold of its schema, if that is lenient."""
        return list(self._matcher.get_grammar_warnings())

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """See `TokenConstraint`; None also after a draft that does not fit, which is rejected."""
        fits = self._move_to(answer)
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self._matcher.is_error():  # a dead end, which llguidance would call the end of the text
            return np.zeros(len(bias), bool)
        return bias > 0 if fits else None

    def follows(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """See `TokenConstraint`; anything may follow the end of the text."""
        if not self._move_to(answer):
            return len(tokens)
        ends = next((at for at, token in enumerate(tokens) if token in self._eos_ids), None)
        inside = list(tokens if ends is None else tokens[: ends + 1])
        fit = int(self._matcher.validate_tokens(inside))
        return len(tokens) if fit == len(inside) else fit

    def _new_matcher(self) -> Any:
        """A matcher at the beginning of the answer."""
        matcher = self._compiled()
        if matcher.try_consume_tokens(self._begun) < len(self._begun):
            raise SettingsError(
                f"{self._what} cannot be used: the message to continue does not fit."
            )
        return matcher

    def _move_to(self, answer: Sequence[int]) -> bool:
        """Move the matcher to the end of an answer; False if the answer does not fit."""
        if self._matcher.is_error():  # after a dead end
            self._matcher, self._read = self._new_matcher(), []
        if not self._eos_ids.isdisjoint(answer):
            return False
        same = 0
        while same < min(len(answer), len(self._read)) and answer[same] == self._read[same]:
            same += 1
        self._matcher.rollback(len(self._read) - same)
        taken = self._matcher.try_consume_tokens(list(answer[same:]))
        self._read = list(answer[: same + taken])
        return len(self._read) == len(answer)


class JsonSchema(Grammar):
    """A grammar for answers that fit a JSON schema.

    Args:
        target: the model whose tokens these are.
        schema: a parsed JSON schema. llguidance's `x-guidance` in it sets the layout; by default
            one space follows each comma and colon, as in the server's answers.

    Raises:
        MissingDependencyError: llguidance is not installed.
        SettingsError: the schema is invalid, or llguidance does not support it.
    """

    def __init__(self, target: Target, schema: Mapping[str, Any]) -> None:
        tokens = GrammarTokens(target)
        super().__init__(tokens, tokens.of_schema(schema), "The JSON schema")
