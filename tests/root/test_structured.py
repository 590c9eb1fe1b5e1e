"""Structured output: answers fit their schema, and are the same with and without drafting."""

import json
import math

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from oracle import Oracle
from tinymodels import model_config, random_drafter, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.targets import Target

pytest.importorskip("llguidance")
from dflash_mlx.structured import GrammarTokens, JsonSchema  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["km", "kg"]},
        "exact": {"type": "boolean"},
    },
    "required": ["sum", "unit", "exact"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model would write mostly whitespace
}
END = "<|end|>"


@pytest.fixture(scope="module")
def target():
    """A random model whose tokens can spell any text."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    byte_level.train_from_iterator(['{"sum": 12, "unit": "km", "exact": true}'] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token=END)
    wrapped = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)
    config = model_config("qwen3", vocab_size=len(tokenizer))
    return Target(random_model(config), tokenizer=wrapped, config=config, name="random")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
def test_answers_fit_the_schema_and_drafting_does_not_change_them(target, temperature):
    prompt = [5, 6, 7]
    for seed in range(4):

        def decode(drafter, seed=seed):
            settings = {"temperature": temperature, "seed": seed, "max_tokens": 120}
            processor = JsonSchema(target, SCHEMA)
            return dm.generate(target, drafter, prompt, logits_processors=[processor], **settings)

        plain = decode(None)
        answer = json.loads(plain.text)
        assert plain.finish_reason == "stop"
        assert 0 <= answer["sum"] <= 999 and answer["unit"] in ("km", "kg")
        assert isinstance(answer["exact"], bool) and len(answer) == 3
        for p in (1.0, 0.6, 0.0):
            oracle = Oracle(prompt, answer=plain.tokens, vocab_size=target.vocab_size, p=p)
            assert decode(oracle).tokens == plain.tokens
        drafted = decode(random_drafter(vocab_size=target.vocab_size))
        assert drafted.tokens == plain.tokens
        # The schema allows a single token at some places, so even random drafts are often right.
        assert drafted.stats.acceptance_length > 1.3


class CountedSchema(JsonSchema):
    """Counts its calls for a row of logits, and for a mask."""

    def __init__(self, target):
        super().__init__(target, SCHEMA)
        self.rows = 0
        self.masks = 0

    def __call__(self, tokens, logits):
        self.rows += 1
        return super().__call__(tokens, logits)

    def allowed(self, answer):
        self.masks += 1
        return super().allowed(answer)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_is_asked_for_many_rows_at_once(target, temperature):
    """It is never called row by row, not even with a penalty, and computes one mask per row."""
    prompt = [5, 6, 7]
    settings = {"temperature": temperature, "seed": 2, "max_tokens": 120}

    def decode(drafter, schema, **more):
        return dm.generate(target, drafter, prompt, logits_processors=[schema], **settings, **more)

    plain = decode(None, CountedSchema(target))
    schema = CountedSchema(target)
    oracle = Oracle(prompt, answer=plain.tokens, vocab_size=target.vocab_size, p=1.0)
    drafted = decode(oracle, schema)
    verified_rows = sum(width * rounds for width, rounds in drafted.stats.widths.items())
    assert drafted.tokens == plain.tokens
    assert schema.rows == 0
    assert schema.masks <= verified_rows + 1  # the first token, which the prefill brings, has one


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_with_a_penalty_is_not_called_row_by_row(target, temperature):
    settings = {"temperature": temperature, "seed": 2, "max_tokens": 120, "presence_penalty": 0.5}
    results = []
    for drafter in (None, random_drafter(vocab_size=target.vocab_size)):
        schema = CountedSchema(target)
        result = dm.generate(target, drafter, [5, 6, 7], logits_processors=[schema], **settings)
        assert json.loads(result.text).keys() == {"sum", "unit", "exact"}
        assert schema.rows == 0
        results.append(result)
    plain, drafted = results
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_length > 1.2


def test_a_schema_says_how_many_tokens_of_a_draft_it_allows(target):
    schema = JsonSchema(target, SCHEMA)
    tokens = target.tokenizer.encode('{"sum":7,"unit":"km","exact":true}')
    (end,) = target.tokenizer.eos_token_ids
    assert schema.follows([], [*tokens, end, 5, 6]) == len(tokens) + 3  # anything after the end
    assert schema.follows([], [*tokens, tokens[0]]) == len(tokens)
    for start in range(len(tokens)):
        answer = tokens[:start]
        assert schema.follows(answer, [end]) == 0
        assert schema.follows(answer, tokens[start:])
        assert schema.allowed(answer)[tokens[start]]
    # After the end, or after a text that does not fit, there is no mask.
    assert schema.allowed([*tokens, end]) is None
    assert schema.allowed([tokens[-1]]) is None


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": 8}, {"separators": (",", ":")}])
@pytest.mark.parametrize("flexible", [False, True])
def test_json_has_one_layout_unless_the_schema_allows_others(target, layout, flexible):
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": True}}
    if not flexible:
        del schema["x-guidance"]
    text = json.dumps({"sum": 12, "unit": "km", "exact": True}, **layout)
    tokens = GrammarTokens(target)
    matcher = tokens.matcher(tokens.of_schema(schema), "The JSON schema")
    ids = target.tokenizer.encode(text)
    fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    is_default_layout = not layout
    assert fits == (flexible or is_default_layout)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "no such type"}, "no such type"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look"),
        (json.dumps({"type": "object"}), "must be a dict"),
        (None, "must be a dict"),
        (True, "must be a dict"),
        ([], "must be a dict"),
        ({"enum": [{1, 2}]}, "set"),
        ({"enum": [math.nan]}, "JSON compliant"),
    ],
)
def test_an_invalid_schema_is_refused_with_the_reason(target, schema, reason):
    with pytest.raises(SettingsError, match=f"schema.*{reason}") as caught:
        JsonSchema(target, schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("inner", [{"$ref": "#"}, {"$ref": "#/properties/a"}])
def test_a_schema_that_no_finite_text_fits_is_an_error_not_an_endless_text(
    target, inner, temperature
):
    """Each object of these schemas must contain another one."""
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    for drafter in (None, random_drafter(vocab_size=target.vocab_size)):
        processor = JsonSchema(target, schema | {"additionalProperties": False})
        with pytest.raises(SettingsError, match="No token can be chosen"):
            dm.generate(
                target,
                drafter,
                [5, 6, 7],
                max_tokens=2000,
                temperature=temperature,
                seed=3,
                logits_processors=[processor],
            )


def test_a_draft_in_a_dead_end_does_not_affect_the_answer(target):
    """The schema's second choice refers to itself, so no text can complete it."""
    dead_end = {"type": "object", "properties": {"a": {"$ref": "#/anyOf/1/properties/a"}}}
    dead_end |= {"required": ["a"], "additionalProperties": False}
    schema = JsonSchema(target, {"anyOf": [{"type": "integer"}, dead_end]})
    answer = target.tokenizer.encode("12")
    wrong_draft = target.tokenizer.encode('{"a": ')
    for _ in range(2):
        assert not schema.allowed(wrong_draft).any()
        assert schema.allowed(answer).any()
        assert schema.follows([], answer) == len(answer)


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_schema_that_no_text_fits_is_refused(target, schema):
    with pytest.raises(SettingsError, match="no text fits"):
        JsonSchema(target, schema)
