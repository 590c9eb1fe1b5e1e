"""What changes logits before a token is chosen: processors, penalties and biases."""

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


def chosen(sampler, proposal, logits):
    """The tokens of a proposal, and the target's after each row."""
    rows = sampler.rows(proposal, logits.shape[-1])
    return list(map(int, proposal.tokens)), sample([rows], logits).tolist()


def test_processors_see_the_history_of_each_path():
    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    sampler = Sampler(RequestSettings(logits_processors=[spy]), prompt=[7, 8])
    chosen(sampler, Proposal([8, 1, 2, 3, 4], (-1, 0, 0, 1, 2)), mx.zeros((5, 10)))
    assert seen == [[7, 8], [7, 8, 1], [7, 8, 2], [7, 8, 1, 3], [7, 8, 2, 4]]
    sampler.commit([1, 3, 9])
    del seen[:]
    sampler.draft(mx.eye(10)[:3])
    assert seen == [[7, 8, 1, 3, 9], [7, 8, 1, 3, 9, 0], [7, 8, 1, 3, 9, 0, 1]]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_repetition_penalty_and_bias_are_those_of_mlx_lm(dtype):
    """For the rows of many requests at once: chains, a tree, texts shorter than the windows."""
    given = [
        {"repetition_penalty": 1.3, "repetition_context_size": 4},
        {"repetition_penalty": 1.7, "logit_bias": {3: 1.5, 8: -2.0}},
        {"repetition_penalty": 1.1, "repetition_context_size": 1},
        {"repetition_penalty": 0.8, "repetition_context_size": 1000},
        {},
    ]
    texts = [[4, 4, 9, 3, 4], [1, 2, 3, 4, 5], [7, 7], [3] * 50 + [4], [1, 1]]
    proposals = [
        *(Proposal([4, 4, 6]), Proposal([5, 1, 2, 3, 4], (-1, 0, 0, 1, 2)), Proposal([7])),
        *(Proposal([4, 9]), Proposal([1, 1])),
    ]
    logits = mx.random.normal((sum(map(len, proposals)), 12), key=mx.random.key(2)).astype(dtype)
    expected = []
    biases = []
    histories = []
    for options, text, proposal in zip(given, texts, proposals, strict=True):
        drafts = list(proposal.tokens)
        settings = RequestSettings(**options)
        for path in proposal.paths():
            row = logits[len(expected) : len(expected) + 1]
            for processor in mlx_lm.make_logits_processors(**options):
                row = processor(mx.array([*text, *(drafts[index] for index in path)]), row)
            expected.append(row)
            biases.append(settings.logit_bias)
        penalties = Penalties(settings, text[:2])
        for token in text[2:]:  # of the prompt or of the answer
            penalties.commit([token])
        histories.append((penalties, mx.array(drafts, mx.int32), proposal.paths()))
    penalized = penalize(histories, add_bias(biases, logits))
    assert mx.array_equal(penalized, mx.concatenate(expected))


# OpenAI's: logits - count * frequency - (count > 0) * presence, over the generated text.
COUNTED = [
    ({"presence_penalty": 0.75, "frequency_penalty": 0.5}, [4, 4, 9, 3, 4]),
    ({"presence_penalty": -0.5}, [1, 2, 3, 4, 5]),
    ({"frequency_penalty": -1.5}, [7] * 100),  # more than mlx-lm looks at
    ({"frequency_penalty": 2.0}, []),
    ({"repetition_penalty": 1.25, "frequency_penalty": 1.0}, [2, 2]),
    ({"presence_penalty": 2.0, "logit_bias": {3: 1.5}}, [3]),
    ({}, [1, 1]),
]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("prompt", [[], [4, 7, 3, 2] * 9])
def test_presence_and_frequency_count_the_generated_text_alone(dtype, prompt):
    """All of it and none of the prompt, the drafts of a row's path included."""
    tree = Proposal([5, 1, 2, 1, 4], (-1, 0, 0, 1, 2))
    proposals = [tree, Proposal([7, 7, 7]), Proposal([9])]
    rows = []
    expected = []
    histories = []
    for number, (options, text) in enumerate(COUNTED):
        proposal = proposals[number % 3]
        settings = RequestSettings(**options)
        penalties = Penalties(settings, prompt)
        penalties.commit(text[:1])
        penalties.commit(text[1:])
        histories.append((penalties, mx.array(proposal.tokens, mx.int32), proposal.paths()))
        for path in proposal.paths():
            written = [*text, *(proposal.tokens[place] for place in path)]
            row = mx.random.normal((12,), key=mx.random.key(len(rows))).astype(dtype)
            rows.append(row)
            if repetition := options.get("repetition_penalty"):
                processor = mlx_lm.make_logits_processors(repetition_penalty=repetition)[-1]
                row = processor(mx.array([*prompt, *written]), row[None])[0]
            counts = np.bincount(written, minlength=12)
            penalty = counts * options.get("frequency_penalty", 0.0)
            penalty = penalty + (counts > 0) * options.get("presence_penalty", 0.0)
            expected.append(row - mx.array(penalty).astype(dtype))
    penalized = penalize(histories, mx.stack(rows))
    assert mx.array_equal(penalized, mx.stack(expected))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_tokens_of_the_prompt_are_not_penalized(penalty):
    """The target reads only the last token, so a longer prompt may not change the text."""
    target = BigramTarget(np.random.default_rng(3).normal(size=(192, 192)))
    settings = {penalty: 1.5, "max_tokens": 40}
    text = dm.generate(target, None, [1], **settings).tokens
    assert dm.generate(target, None, [*text, *text, 1], **settings).tokens == text
    assert text != dm.generate(target, None, [1], max_tokens=40).tokens


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_bias_forces_and_bans_in_every_precision(dtype):
    logits = mx.random.normal((1, 12), key=mx.random.key(1)).astype(dtype)
    for temperature in (0.0, 0.8):
        bias = {3: 1e5, 4: -1e5, 5: 1e4}
        settings = RequestSettings(temperature=temperature, seed=1, logit_bias=bias)
        assert chosen(Sampler(settings), Proposal([1]), logits)[1] == [3]
        settings = RequestSettings(
            temperature=temperature, seed=1, logit_bias=dict.fromkeys(range(11), -1e38)
        )
        assert chosen(Sampler(settings), Proposal([1]), logits)[1] == [11]


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
    processors = [lambda tokens, logits: result(logits)]
    settings = {"logits_processors": processors, "temperature": temperature}
    with pytest.raises(SettingsError, match=message) as caught:
        dm.generate(target, None, [1], max_tokens=3, **settings)
    assert "\n" not in str(caught.value)


def test_a_processor_may_forbid_every_token_after_a_wrong_draft():
    """A grammar allows no token after a text that it forbids, and a wrong draft may be one."""
    table = np.random.default_rng(1).normal(size=(50, 50))
    target = BigramTarget(table)
    text = [1, *dm.generate(target, None, [1], max_tokens=8).tokens]

    def allowed(tokens, logits):
        right = tokens.tolist() == text[: tokens.size]
        return logits if right else mx.full(logits.shape, -mx.inf)

    settings = {"max_tokens": 8, "block_size": 4, "logits_processors": [allowed]}
    result = dm.generate(target, BigramDrafter(table), [1], **settings)
    assert result.tokens == text[1:] and result.stats.accepted_tokens < result.stats.drafted_tokens
