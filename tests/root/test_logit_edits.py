"""Processors, penalties and biases, which change logits before a token is chosen."""

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.penalties import Penalties, add_bias, penalize
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Sampler, sample
from dflash_mlx.settings import RequestSettings


def choices(sampler, proposal, logits):
    """The token that the target chooses after each row of a proposal."""
    rows = sampler.rows(proposal, logits.shape[-1])
    return sample([rows], logits).tolist()


def test_processors_see_the_history_of_each_path():
    """That is the prompt, what was committed, and the drafts on the way to the row."""
    histories = []

    def spy(tokens, logits):
        histories.append(tokens.tolist())
        return logits

    sampler = Sampler(RequestSettings(logits_processors=[spy]), prompt=[7, 8])
    tree = Proposal([8, 1, 2, 3, 4], (-1, 0, 0, 1, 2))
    choices(sampler, tree, mx.zeros((5, 10)))
    assert histories == [[7, 8], [7, 8, 1], [7, 8, 2], [7, 8, 1, 3], [7, 8, 2, 4]]
    sampler.commit([1, 3, 9])
    histories.clear()
    sampler.draft(mx.eye(10)[:3])  # drafts the tokens 0, 1 and 2
    assert histories == [[7, 8, 1, 3, 9], [7, 8, 1, 3, 9, 0], [7, 8, 1, 3, 9, 0, 1]]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_repetition_penalty_and_bias_are_those_of_mlx_lm(dtype):
    """Compare five requests, whose rows are penalized together, with mlx-lm's row by row.

    They have chains and a tree, and texts longer and shorter than the window of the penalty.
    """
    settings_of_requests = [
        {"repetition_penalty": 1.3, "repetition_context_size": 4},
        {"repetition_penalty": 1.7, "logit_bias": {3: 1.5, 8: -2.0}},
        {"repetition_penalty": 1.1, "repetition_context_size": 1},
        {"repetition_penalty": 0.8, "repetition_context_size": 1000},
        {},
    ]
    texts = [[4, 4, 9, 3, 4], [1, 2, 3, 4, 5], [7, 7], [3] * 50 + [4], [1, 1]]
    proposals = [
        Proposal([4, 4, 6]),
        Proposal([5, 1, 2, 3, 4], (-1, 0, 0, 1, 2)),
        Proposal([7]),
        Proposal([4, 9]),
        Proposal([1, 1]),
    ]
    logits = mx.random.normal((sum(map(len, proposals)), 12), key=mx.random.key(2)).astype(dtype)
    expected = []
    biases = []
    histories = []
    for options, text, proposal in zip(settings_of_requests, texts, proposals, strict=True):
        drafts = list(proposal.tokens)
        settings = RequestSettings(**options)
        for path in proposal.paths():
            history = [*text, *(drafts[index] for index in path)]
            number = len(expected)
            row = logits[number : number + 1]
            for processor in mlx_lm.make_logits_processors(**options):
                row = processor(mx.array(history), row)
            expected.append(row)
            biases.append(settings.logit_bias)
        # The penalty counts the prompt (two tokens) and the answer (the others) alike.
        penalties = Penalties(settings, text[:2])
        for token in text[2:]:
            penalties.commit([token])
        histories.append((penalties, mx.array(drafts, mx.int32), proposal.paths()))
    penalized = penalize(histories, add_bias(biases, logits))
    assert mx.array_equal(penalized, mx.concatenate(expected))


# Penalties, and the text generated so far. OpenAI defines them over the generated text:
# logits - count * frequency_penalty - (count > 0) * presence_penalty.
PENALTIES_AND_TEXTS = [
    ({"presence_penalty": 0.75, "frequency_penalty": 0.5}, [4, 4, 9, 3, 4]),
    ({"presence_penalty": -0.5}, [1, 2, 3, 4, 5]),
    ({"frequency_penalty": -1.5}, [7] * 100),  # mlx-lm counts the last 20 only
    ({"frequency_penalty": 2.0}, []),
    ({"repetition_penalty": 1.25, "frequency_penalty": 1.0}, [2, 2]),
    ({"presence_penalty": 2.0, "logit_bias": {3: 1.5}}, [3]),
    ({}, [1, 1]),
]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("prompt", [[], [4, 7, 3, 2] * 9])
def test_presence_and_frequency_count_only_the_generated_text(dtype, prompt):
    """They count the whole answer and the drafts on a row's path, but not the prompt."""
    tree = Proposal([5, 1, 2, 1, 4], (-1, 0, 0, 1, 2))
    proposals = [tree, Proposal([7, 7, 7]), Proposal([9])]
    rows = []
    expected = []
    histories = []
    for number, (options, text) in enumerate(PENALTIES_AND_TEXTS):
        proposal = proposals[number % 3]
        settings = RequestSettings(**options)
        penalties = Penalties(settings, prompt)
        penalties.commit(text[:1])
        penalties.commit(text[1:])
        histories.append((penalties, mx.array(proposal.tokens, mx.int32), proposal.paths()))
        for path in proposal.paths():
            generated = [*text, *(proposal.tokens[index] for index in path)]
            row = mx.random.normal((12,), key=mx.random.key(len(rows))).astype(dtype)
            rows.append(row)
            repetition = options.get("repetition_penalty")
            if repetition:
                processor = mlx_lm.make_logits_processors(repetition_penalty=repetition)[-1]
                row = processor(mx.array([*prompt, *generated]), row[None])[0]
            counts = np.bincount(generated, minlength=12)
            penalty = counts * options.get("frequency_penalty", 0.0)
            penalty = penalty + (counts > 0) * options.get("presence_penalty", 0.0)
            expected.append(row - mx.array(penalty).astype(dtype))
    penalized = penalize(histories, mx.stack(rows))
    assert mx.array_equal(penalized, mx.stack(expected))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_tokens_of_the_prompt_are_not_penalized(penalty):
    """A bigram target sees only the last token, so a longer prompt must not change the text."""
    target = BigramTarget(np.random.default_rng(3).normal(size=(192, 192)))
    settings = {penalty: 1.5, "max_tokens": 40}
    text = dm.generate(target, None, [1], **settings).tokens
    assert dm.generate(target, None, [*text, *text, 1], **settings).tokens == text
    without_penalty = dm.generate(target, None, [1], max_tokens=40).tokens
    assert text != without_penalty


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_bias_forces_and_bans_in_every_precision(dtype):
    """A bias that float16 cannot hold must still force one token or ban all others."""
    logits = mx.random.normal((1, 12), key=mx.random.key(1)).astype(dtype)
    force_3 = {3: 1e5, 4: -1e5, 5: 1e4}
    ban_all_but_11 = dict.fromkeys(range(11), -1e38)
    for temperature in (0.0, 0.8):
        for bias, expected in ((force_3, 3), (ban_all_but_11, 11)):
            settings = RequestSettings(temperature=temperature, seed=1, logit_bias=bias)
            assert choices(Sampler(settings), Proposal([1]), logits) == [expected]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda logits: None, r"shape \(1, 192\), not None"),
        (lambda logits: logits[0], r"shape \(1, 192\), not \(192,\)"),
        (lambda logits: logits[:, :5], r"shape \(1, 192\), not \(1, 5\)"),
        (lambda logits: mx.where(mx.arange(192) == 7, mx.nan, logits), "NaN"),
        (lambda logits: mx.full(logits.shape, -mx.inf), "nothing but -inf"),
        (lambda logits: mx.where(mx.arange(192) == 7, mx.inf, logits), "infinite"),
    ],
    ids=["nothing", "no rows", "fewer tokens", "one NaN", "only -inf", "inf"],
)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_an_invalid_result_of_a_processor_is_refused(result, message, temperature):
    target = BigramTarget(np.zeros((192, 192)))

    def processor(tokens, logits):
        return result(logits)

    settings = {"logits_processors": [processor], "temperature": temperature}
    with pytest.raises(SettingsError, match=message) as caught:
        dm.generate(target, None, [1], max_tokens=3, **settings)
    assert "\n" not in str(caught.value)


def test_a_processor_may_forbid_every_token_after_a_wrong_draft():
    """A grammar allows no token after a text that it forbids.

    The text that ends with a wrong draft may be such a text. That must not end the answer, because
    the draft is rejected.
    """
    table = np.random.default_rng(1).normal(size=(50, 50))
    target = BigramTarget(table)
    text = [1, *dm.generate(target, None, [1], max_tokens=8).tokens]

    def forbid_other_texts(tokens, logits):
        is_beginning = tokens.tolist() == text[: tokens.size]
        return logits if is_beginning else mx.full(logits.shape, -mx.inf)

    settings = {"max_tokens": 8, "block_size": 4, "logits_processors": [forbid_other_texts]}
    result = dm.generate(target, BigramDrafter(table), [1], **settings)
    assert result.tokens == text[1:]
    assert result.stats.accepted_tokens < result.stats.drafted_tokens, "no draft was wrong"
