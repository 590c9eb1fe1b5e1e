"""Answers that fit a JSON schema: a grammar as one more logits processor.

    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    dm.generate(target, drafter, "What is 37 + 48?", logits_processors=[JsonSchema(target, schema)])

The grammar is llguidance's (the `structured` extra). A grammar is
asked about every row with its own path, so the drafter's tokens fit the schema as well and are
accepted as often as any others. It reads token ids on the host, so drafting waits for the device
once a round, and once for each draft that does not fit (`rules`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from .errors import MissingDependencyError, SettingsError
from .validation import brief, error_text

if TYPE_CHECKING:
    from .targets import Target


# Between the parts of an object stands one space and no more: small models would fill an answer
# with white space where that is allowed.
SPACES: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that says how JSON is laid out, too; an `x-guidance` of its own stays."""
    return {"x-guidance": SPACES, **schema}


class GrammarTokens:
    """A target's tokens as llguidance knows them; made once, for any number of grammars.

    Raises `MissingDependencyError` where llguidance is not installed.
    """

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError as error:
            raise MissingDependencyError.of("llguidance is not installed", "structured") from error
        self.eos_ids = frozenset(target.tokenizer.eos_token_ids)
        self._tokenizer = LLTokenizer(
            target.tokenizer.backend_tokenizer.to_str(),
            n_vocab=target.vocab_size,
            eos_token=sorted(self.eos_ids),
        )
        self._matchers = LLMatcher

    def of_schema(self, schema: Mapping[str, Any]) -> str:
        """The grammar of what fits a schema, `laid_out`.

        Raises `SettingsError` for a schema that is no object of JSON.
        """
        if not isinstance(schema, Mapping):
            raise SettingsError(
                f"The JSON schema must be a dict, as json.loads makes one, not {brief(schema)}."
            )
        try:
            text = json.dumps(laid_out(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(f"The JSON schema cannot be JSON: {error_text(error)}.") from error
        return str(self._matchers.grammar_from_json_schema(text))

    def of_lark(self, lark: str) -> str:
        """The grammar that a text in llguidance's dialect of Lark describes."""
        return str(self._matchers.grammar_from_lark(lark))

    def matcher(self, grammar: str, what: str) -> Any:
        """What follows one text through a grammar. Raises `SettingsError`, about `what`."""
        problem = self._matchers.validate_grammar(grammar, self._tokenizer)
        if problem:
            # Of a regular expression the first line has the place, and the last one the reason.
            raise SettingsError(f"{what} cannot be used: {' '.join(problem.split())}")
        return self._matchers(self._tokenizer, grammar)


class Grammar:
    """A logits processor that leaves only the tokens with which an answer still fits a grammar.

    It serves one request. The first history it is shown is that request's prompt. Where it stands
    last among the processors it is asked as a `Rule`, for all rows of a round at once.

    Args:
        tokens: the target's.
        grammar: one of llguidance's.
        what: it is called in an error.

    Raises `SettingsError` for a grammar that is none, or says what llguidance does not support.
    """

    def __init__(self, tokens: GrammarTokens, grammar: str, what: str = "The grammar") -> None:
        self._eos_ids = tokens.eos_ids
        self._matcher = tokens.matcher(grammar, what)
        self._prompt: int | None = None
        self._read: list[int] = []  # tokens of an answer that the matcher has taken in

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V] with -inf where the grammar allows no token after the history [H]."""
        if self._prompt is None:
            self._prompt = len(tokens)
        answer: Any = tokens[self._prompt :].tolist()
        allowed = self.allowed(answer)
        return logits if allowed is None else mx.where(mx.array(allowed), logits, -mx.inf)

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """As `Rule`; None also after a draft that does not fit, whose row will be rejected."""
        if not self._move_to(answer):
            return None
        return np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0

    def follows(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """As `Rule`; what comes after the end of the text may be anything."""
        if not self._move_to(answer):
            return len(tokens)
        ends = next((at for at, token in enumerate(tokens) if token in self._eos_ids), None)
        inside = list(tokens if ends is None else tokens[: ends + 1])
        fit = int(self._matcher.validate_tokens(inside))
        return len(tokens) if fit == len(inside) else fit

    def _move_to(self, answer: Sequence[int]) -> bool:
        """Bring the matcher to the end of an answer; False if the grammar does not lead there."""
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
    """The same for answers that fit a JSON schema.

    Args:
        target: whose tokens these are.
        schema: a JSON schema, as parsed. Its `x-guidance`, llguidance's, says how the answer is
            laid out; else one space stands behind a comma and a colon, as the server has it.

    Raises:
        MissingDependencyError: llguidance is not installed.
        SettingsError: the schema is not one, or says what llguidance does not support.
    """

    def __init__(self, target: Target, schema: Mapping[str, Any]) -> None:
        tokens = GrammarTokens(target)
        super().__init__(tokens, tokens.of_schema(schema), "The JSON schema")
