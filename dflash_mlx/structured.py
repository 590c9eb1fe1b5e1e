"""Answers that fit a JSON schema, by a grammar that runs as a logits processor.

    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    dm.generate(target, drafter, "What is 37 + 48?", logits_processors=[JsonSchema(target, schema)])

llguidance (the `structured` extra) runs the grammar. It applies to each row with the row's own
path, so drafted tokens fit the schema as well, and are accepted as often as without one. It needs
token ids on the host, so a step waits for its drafts, and once more for each draft that does not
fit (`constraints`).
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


# The layout of JSON answers: small models would fill them with white space if they could.
SPACES: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What llguidance writes around the reason of an error: a line number, and the whole grammar.
_CONTEXT: Final = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *\d+ \| (?s:.*)"
)


class GrammarTokens:
    """A target's vocabulary for llguidance. Any number of grammars can share it.

    Raises `MissingDependencyError` if llguidance is not installed.
    """

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError as error:
            raise MissingDependencyError.of("llguidance is not installed", "structured") from error
        vocabulary = target.tokenizer.backend_tokenizer
        ends = target.tokenizer.eos_token_ids
        # Some fine-tunes name an EOS id that the tokenizer does not have; llguidance refuses those.
        self.eos_ids = frozenset(end for end in ends if end >= 0 and vocabulary.id_to_token(end))
        self._tokenizer = LLTokenizer(
            vocabulary.to_str(),
            n_vocab=target.vocab_size,
            eos_token=sorted(self.eos_ids),
        )
        self._matchers = LLMatcher

    def of_schema(self, schema: Mapping[str, Any]) -> str:
        """Convert a JSON schema to a grammar, laid out with `SPACES`.

        An `x-guidance` in the schema sets another layout.

        Raises `SettingsError` for a schema that is not a JSON object.
        """
        if not isinstance(schema, Mapping):
            raise SettingsError(f"The JSON schema must be a dict, not {brief(schema)}.")
        try:
            text = json.dumps({"x-guidance": SPACES, **schema}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(
                f"The JSON schema cannot be written as JSON: {error_text(error)}."
            ) from error
        return str(self._matchers.grammar_from_json_schema(text))

    def of_text(self, text: str, added: Mapping[str, int]) -> list[int]:
        """Convert a text to token ids, in which the `added` tokens stand for themselves.

        The ids spell the text byte for byte. Those of the tokenizer might not: SentencePiece begins
        a text with a space.
        """
        if not added:
            return list(self._tokenizer.greedy_tokenize(text))
        names = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        ids: list[int] = []
        for part in re.split(f"({names})", text):
            if part in added:
                ids.append(added[part])
            else:
                ids += self._tokenizer.greedy_tokenize(part)
        return ids

    def of_lark(self, lark: str) -> str:
        """Convert a text in llguidance's dialect of Lark to a grammar."""
        return str(self._matchers.grammar_from_lark(lark))

    def matcher(self, grammar: str, name: str) -> Any:
        """Make a matcher for one text.

        Raises `SettingsError` for an invalid grammar, with `name` in the message.
        """
        problem = self._matchers.validate_grammar(grammar, self._tokenizer)
        matcher = self._matchers(self._tokenizer, grammar)
        if not problem:
            matcher.compute_logit_bias()
            problem = "no text fits it" if matcher.is_error() else ""
        if problem:
            # Keep all lines: for a regular expression the last one has the reason.
            reason = " ".join(_CONTEXT.sub("", problem).split())
            raise SettingsError(f"{name} cannot be used: {reason}")
        return matcher


class Grammar:
    """A logits processor that allows only tokens that fit a grammar.

    It serves one request, and takes the first history that it sees for the prompt. If it is the
    last of the processors, it is used as a `TokenConstraint` for all rows of a step at once.

    Args:
        tokens: the target's vocabulary.
        grammar: a grammar of llguidance, from a method of `tokens`.
        name: what error messages call the grammar.
        begun: token ids that the prompt ends with and that the text begins with.

    Raises `SettingsError` for an invalid grammar, one that llguidance does not support, or one that
    `begun` does not fit.
    """

    def __init__(
        self,
        tokens: GrammarTokens,
        grammar: str,
        name: str = "The grammar",
        begun: Sequence[int] = (),
    ) -> None:
        self._eos_ids = tokens.eos_ids
        self._begun = list(begun)
        self._name = name
        self._compile = partial(tokens.matcher, grammar, name)
        self._matcher = self._new_matcher()
        self._prompt_length: int | None = None
        self._consumed: list[int] = []  # the tokens that the matcher has read

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits [1, V] of tokens that may not follow the history [H] to -inf."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        answer: Any = tokens[self._prompt_length :].tolist()
        allowed = self.allowed(answer)
        return logits if allowed is None else mx.where(mx.array(allowed), logits, -mx.inf)

    @property
    def warnings(self) -> list[str]:
        """Parts of a lenient schema that the grammar does not enforce."""
        return list(self._matcher.get_grammar_warnings())

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow an answer, [V] of bool.

        Returns None if all may: after the end of the text, and after a draft that does not fit,
        which will be rejected.
        """
        fits = self._move_to(answer)
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self._matcher.is_error():  # a dead end, which llguidance would call the end of the text
            return np.zeros(len(bias), bool)
        return bias > 0 if fits else None

    def follows(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may follow an answer.

        Any token may follow the end of the text.
        """
        if not self._move_to(answer):
            return len(tokens)
        before_end = list(tokens)
        for index, token in enumerate(tokens):
            if token in self._eos_ids:
                before_end = list(tokens[: index + 1])
                break
        valid = int(self._matcher.validate_tokens(before_end))
        return len(tokens) if valid == len(before_end) else valid

    def _new_matcher(self) -> Any:
        """Make a matcher that stands at the beginning of the answer."""
        matcher = self._compile()
        if matcher.try_consume_tokens(self._begun) < len(self._begun):
            raise SettingsError(
                f"{self._name} cannot be used: the message to continue does not fit."
            )
        return matcher

    def _move_to(self, answer: Sequence[int]) -> bool:
        """Move the matcher to the end of an answer. Returns False if the answer does not fit."""
        if self._matcher.is_error():  # after a dead end
            self._matcher = self._new_matcher()
            self._consumed = []
        if not self._eos_ids.isdisjoint(answer):
            return False
        shared = 0
        most = min(len(answer), len(self._consumed))
        while shared < most and answer[shared] == self._consumed[shared]:
            shared += 1
        self._matcher.rollback(len(self._consumed) - shared)
        accepted = self._matcher.try_consume_tokens(list(answer[shared:]))
        self._consumed = list(answer[: shared + accepted])
        return len(self._consumed) == len(answer)


class JsonSchema(Grammar):
    """A grammar for answers that fit a JSON schema.

    Args:
        target: the model that answers.
        schema: a parsed JSON schema. llguidance's `x-guidance` in it sets the layout. By default
            one space follows each comma and colon, as in the server's answers.

    Raises:
        MissingDependencyError: llguidance is not installed.
        SettingsError: the schema is invalid, or llguidance does not support it.
    """

    def __init__(self, target: Target, schema: Mapping[str, Any]) -> None:
        tokens = GrammarTokens(target)
        super().__init__(tokens, tokens.of_schema(schema), "The JSON schema")
