"""The processed distribution, the noise, and settings that are refused instead of ignored."""

import math
from fractions import Fraction

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget, softmax

import dflash_mlx as dm
from dflash_mlx.distributions import gumbel, keep_min_p, keep_top_k, keep_top_p
from dflash_mlx.errors import SettingsError
from dflash_mlx.penalties import Penalties, add_bias, penalize
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Sampler, sample
from dflash_mlx.settings import RequestSettings

VOCABULARIES = [16, 200]


def surprise(observed, expected):
    """How many standard deviations a chi-square statistic is too large (Wilson and Hilferty).

    Cells that expect fewer than five are put together. p > 1e-3 is a value below 3.09.
    """
    observed = np.ravel(observed)
    expected = np.ravel(expected)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    assert observed[~possible].sum() == 0, "a token that has no probability was sampled"
    observed = observed[possible]
    expected = expected[possible]
    assert math.isclose(observed.sum(), expected.sum(), rel_tol=1e-5)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    scale = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5


def processed(logits, temperature, top_p=1.0, top_k=0, min_p=0.0):
    """The distribution one after the other, in numpy: what mlx-lm's samplers sample from."""
    p = softmax(logits)
    order = np.argsort(-p, kind="stable")
    if top_p < 1:
        p[order[1:][np.cumsum(p[order])[:-1] >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    if top_k:
        p[order[top_k:]] = 0
    p = p ** (1 / temperature)
    return p / p.sum()


def chosen(sampler, proposal, logits):
    """The tokens of a proposal, and the target's after each row."""
    rows = sampler.rows(proposal, logits.shape[-1])
    return list(map(int, proposal.tokens)), sample([rows], logits).tolist()


def choices(settings, logits, rows=1, seed=0):
    """The choices at positions 0..rows-1 of a chain whose rows all have these logits [V]."""
    sampler = Sampler(RequestSettings(seed=seed, **settings))
    table = mx.broadcast_to(mx.array(logits, mx.float32), (rows, len(logits)))
    return chosen(sampler, Proposal([0] * rows), table)[1]


FILTERS = [{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}]
FILTERS.append({"top_p": 0.95, "top_k": 12, "min_p": 0.01})


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.3])
def test_next_tokens_follow_the_processed_distribution(vocabulary, filters, temperature):
    logits = 2 * np.random.default_rng(vocabulary).normal(size=vocabulary)
    rows = 5000
    chosen = choices({"temperature": temperature, **filters}, logits, rows, seed=vocabulary)
    expected = rows * processed(logits, temperature, **filters)
    assert surprise(np.bincount(chosen, minlength=vocabulary), expected) < 3.09


@pytest.mark.parametrize("vocabulary", [16, 200])
@pytest.mark.parametrize("drafts", [False, True])
def test_two_tokens_follow_the_joint_distribution(vocabulary, drafts):
    """Through the whole loop: what is drafted must not bend what is chosen.

    A first token without a choice comes before them, for that is the prefill's.
    """
    table = 2 * np.random.default_rng(vocabulary).normal(size=(vocabulary, vocabulary))
    # token 0 comes after token 1, always
    table[1] = 0
    table[1, 0] = 100
    target = BigramTarget(table)
    drafter = BigramDrafter(table) if drafts else None
    settings = {"temperature": 0.9, "top_k": 8, "max_tokens": 3, "block_size": 3}
    counts = np.zeros((vocabulary, vocabulary))
    seeds = 3000
    accepted = 0
    for seed in range(seeds):
        result = dm.generate(target, drafter, [1], seed=seed, **settings)
        counts[tuple(result.tokens[1:])] += 1
        accepted += result.stats.accepted_tokens
    rows = np.stack([processed(row, 0.9, top_k=8) for row in table])
    assert surprise(counts, seeds * rows[0][:, None] * rows) < 3.09
    assert (accepted > seeds / 3) == drafts


def test_noise_is_independent_across_positions_and_seeds():
    rows = 64
    vocabulary = 2000
    of = {
        seed: np.array(gumbel([(seed, at) for at in range(rows)], vocabulary))
        for seed in (0, 1, 2, 40)
    }
    limit = 4.5 / vocabulary**0.5
    for noise in of.values():
        between = np.corrcoef(noise)[~np.eye(rows, dtype=bool)]
        assert np.abs(between).max() < limit
        along = [np.corrcoef(row[:-lag], row[lag:])[0, 1] for row in noise for lag in (1, 2)]
        assert np.abs(along).max() < limit
    # Other seeds, and position and seed exchanged.
    across = [np.corrcoef(of[0][i], of[1][j])[0, 1] for i in range(9) for j in range(9)]
    across += [np.corrcoef(of[2][40], of[40][2])[0, 1]]
    assert np.abs(across).max() < limit


def test_noise_is_gumbel():
    noise = np.array(gumbel([(9, at) for at in range(100)], 2000)).astype(np.float64)
    uniform = np.sort(np.exp(-np.exp(-noise)), axis=None)
    steps = np.arange(1, len(uniform) + 1) / len(uniform)
    assert np.abs(uniform - steps).max() < 1.95 / len(uniform) ** 0.5  # Kolmogorov, p > 1e-3


@pytest.mark.parametrize("vocabulary", [17, 192, 1000])
def test_noise_of_a_position_does_not_depend_on_what_is_made_with_it(vocabulary):
    together = gumbel([(3, 100 + at) for at in range(16)], vocabulary)
    for row in (0, 7, 15):
        assert mx.array_equal(together[row : row + 1], gumbel([(3, 100 + row)], vocabulary))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: keep_top_p(x, 0.7), lambda x: mlx_lm.apply_top_p(x, 0.7)),
        (lambda x: keep_min_p(x, 0.1), lambda x: mlx_lm.apply_min_p(x, 0.1)),
        (lambda x: keep_top_k(x, 9), lambda x: mlx_lm.apply_top_k(x, 9)),
    ],
    ids=["top_p", "min_p", "top_k"],
)
def test_filters_keep_what_mlx_lm_keeps(ours, theirs):
    mx.random.seed(0)
    logits = 2 * mx.random.normal((40, 150))
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    kept = theirs(log_probs)
    assert mx.array_equal(mx.isinf(ours(log_probs)), mx.isinf(kept))
    assert mx.array_equal(ours(log_probs[3:4]), ours(log_probs)[3:4])
    assert mx.array_equal(mx.isinf(ours(logits)), mx.isinf(kept)), "normalizing must not matter"


def test_greedy_takes_the_largest_logit_and_the_first_of_equals():
    logits = mx.array([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0], [-3.0, -2.0, -1.0]])
    for settings in (
        RequestSettings(),
        RequestSettings(seed=7),
        RequestSettings(top_p=0.1, top_k=2, min_p=0.5),
    ):
        sampler = Sampler(settings)
        assert chosen(sampler, Proposal([0, 1, 2]), logits) == ([0, 1, 2], [1, 0, 2])
        assert sampler.seed is None and sampler.draft(logits).tolist() == [1, 0, 2]


def test_the_seed_and_nothing_else_decides():
    target = BigramTarget(np.zeros((192, 192)))
    settings = {"temperature": 1.0, "max_tokens": 24}
    texts = [dm.generate(target, None, [1], seed=seed, **settings).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    fresh = dm.generate(target, None, [1], **settings)
    again = dm.generate(target, None, [1], seed=fresh.stats.seed, **settings)
    assert again.tokens == fresh.tokens


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
    for of, text, proposal in zip(given, texts, proposals, strict=True):
        drafts = list(proposal.tokens)
        settings = RequestSettings(**of)
        for path in proposal.paths():
            row = logits[len(expected) : len(expected) + 1]
            for processor in mlx_lm.make_logits_processors(**of):
                row = processor(mx.array([*text, *(drafts[at] for at in path)]), row)
            expected.append(row)
            biases.append(settings.logit_bias)
        penalties = Penalties(settings, text[:2])
        for token in text[2:]:  # of the prompt or of the answer
            penalties.commit([token])
        histories.append((penalties, mx.array(drafts, mx.int32), proposal.paths()))
    found = penalize(histories, add_bias(biases, logits))
    assert mx.array_equal(found, mx.concatenate(expected))


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
    for number, (of, text) in enumerate(COUNTED):
        proposal = proposals[number % 3]
        settings = RequestSettings(**of)
        penalties = Penalties(settings, prompt)
        penalties.commit(text[:1])
        penalties.commit(text[1:])
        histories.append((penalties, mx.array(proposal.tokens, mx.int32), proposal.paths()))
        for path in proposal.paths():
            written = [*text, *(proposal.tokens[place] for place in path)]
            row = mx.random.normal((12,), key=mx.random.key(len(rows))).astype(dtype)
            rows.append(row)
            if repetition := of.get("repetition_penalty"):
                processor = mlx_lm.make_logits_processors(repetition_penalty=repetition)[-1]
                row = processor(mx.array([*prompt, *written]), row[None])[0]
            counts = np.bincount(written, minlength=12)
            penalty = counts * of.get("frequency_penalty", 0.0)
            penalty = penalty + (counts > 0) * of.get("presence_penalty", 0.0)
            expected.append(row - mx.array(penalty).astype(dtype))
    found = penalize(histories, mx.stack(rows))
    assert mx.array_equal(found, mx.stack(expected))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_what_the_prompt_says_is_no_repetition(penalty):
    """The text is the same after any prompt that ends alike, and is penalized all along."""
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


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-40, 1e-3])
def test_of_the_smallest_top_p_the_likeliest_token_is_left(top_p):
    """To f32 the first two are 0, of which the likeliest token, too, has more above it."""
    table = np.random.default_rng(5).normal(size=(192, 192))
    target = BigramTarget(table)
    settings = {"temperature": 1.0, "seed": 2, "max_tokens": 12}
    greedy = dm.generate(target, None, [1], max_tokens=12).tokens
    for drafter in (None, BigramDrafter(table)):
        assert dm.generate(target, drafter, [1], top_p=top_p, **settings).tokens == greedy


@pytest.mark.parametrize("temperature", [1e-20, 1e-10, 1e-4])
def test_the_smallest_temperatures_are_greedy(temperature):
    mx.random.seed(3)
    logits = 30 * mx.random.normal((50, 40))
    tokens = [0] * 50
    greedy = chosen(Sampler(RequestSettings()), Proposal(tokens), logits)
    cold = chosen(
        Sampler(RequestSettings(temperature=temperature, seed=1)), Proposal(tokens), logits
    )
    assert cold == greedy


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
def test_what_a_processor_may_not_return(result, message, temperature):
    target = BigramTarget(np.zeros((192, 192)))
    processors = [lambda tokens, logits: result(logits)]
    settings = {"logits_processors": processors, "temperature": temperature}
    with pytest.raises(SettingsError, match=message) as caught:
        dm.generate(target, None, [1], max_tokens=3, **settings)
    assert "\n" not in str(caught.value)


def test_what_a_processor_leaves_after_a_wrong_draft_matters_to_nobody():
    """A grammar has no token for a text that it forbids, and drafts may be such."""
    table = np.random.default_rng(1).normal(size=(50, 50))
    target = BigramTarget(table)
    text = [1, *dm.generate(target, None, [1], max_tokens=8).tokens]

    def allowed(tokens, logits):
        right = tokens.tolist() == text[: tokens.size]
        return logits if right else mx.full(logits.shape, -mx.inf)

    settings = {"max_tokens": 8, "block_size": 4, "logits_processors": [allowed]}
    result = dm.generate(target, BigramDrafter(table), [1], **settings)
    assert result.tokens == text[1:] and result.stats.accepted_tokens < result.stats.drafted_tokens


def test_numbers_of_numpy_and_fractions_are_numbers():
    table = np.random.default_rng(1).normal(size=(50, 50))
    target = BigramTarget(table)
    drafter = BigramDrafter(table)
    plain = {"max_tokens": 5, "temperature": 0.5, "seed": 3, "top_k": 9, "logit_bias": {4: 1.0}}
    others = {"max_tokens": np.int64(5), "temperature": Fraction(1, 2), "seed": np.uint32(3)}
    others |= {"top_k": np.int8(9), "logit_bias": {np.int64(4): np.float32(1)}}
    others |= {"top_p": np.float32(1), "repetition_context_size": np.int16(20)}
    expected = dm.generate(target, None, [1, 2], **plain).tokens
    ids = [np.int64(1), np.int32(2)]
    block_size = np.int64(3)
    assert dm.generate(target, None, ids, **others).tokens == expected
    assert dm.generate(target, drafter, ids, block_size=block_size, **others).tokens == expected


class Odd:
    """A constraint: every other token is odd."""

    def follows(self, answer, tokens):
        ends = (at for at, one in enumerate(tokens) if one % 2 != (len(answer) + at) % 2)
        return next(ends, len(tokens))

    def allowed(self, answer):
        return np.arange(30) % 2 == len(answer) % 2

    def __call__(self, tokens, logits):
        raise AssertionError("constraints are not called")


@pytest.mark.parametrize("ahead", [0, 1])
def test_choices_of_many_requests_are_those_alone(ahead):
    """Greedy and sampled rows, plain and drafted ones, equal settings and others, in one call."""
    settings = [
        *({}, {"temperature": 0.7, "seed": 1}, {"logit_bias": {3: 2.0}}, {}),
        *({"temperature": 0.7, "seed": 2}, {"temperature": 0.7, "seed": 1, "top_k": 5}),
        *({"temperature": 0.7, "seed": 2, "drafts": 4}, {"drafts": 4}),
        {"drafts": 3, "logit_bias": {5: 1.5, 7: -1.0, 3: 4.0}},
    ]
    if not ahead:  # these read the token before
        settings += [
            *({"frequency_penalty": 0.6, "drafts": 2}, {"presence_penalty": 1.0}),
            *({"logits_processors": [lambda _, x: -x], "drafts": 3}, {"repetition_penalty": 1.3}),
            {"logits_processors": [Odd()], "drafts": 2},
            {"logits_processors": [Odd()], "drafts": 4, "temperature": 0.7, "seed": 2},
        ]

    def requests():
        for number, of in enumerate(settings):
            own = {name: value for name, value in of.items() if name != "drafts"}
            sampler = Sampler(RequestSettings(**own), [1] * number)
            proposal = Proposal([2])
            if count := of.get("drafts"):
                drafts = sampler.draft(mx.random.normal((count, 30), key=mx.random.key(number)))
                proposal = Proposal(mx.concatenate([mx.array([2]), drafts.astype(mx.int32)]))
            rows = len(proposal), 30
            yield sampler, proposal, mx.random.normal(rows, key=mx.random.key(99 + number))

    alone = mx.concatenate(
        [
            sample([sampler.rows(proposal, 30, ahead)], logits)
            for sampler, proposal, logits in requests()
        ]
    )
    together = list(requests())
    rows = [sampler.rows(proposal, 30, ahead) for sampler, proposal, _ in together]
    logits = mx.concatenate([logits for *_, logits in together])
    found = sample(rows, logits)
    assert found.tolist() == alone.tolist()
    assert sample(rows, logits).tolist() == found.tolist(), "it changes nothing"
    keys = [sampler.group for sampler, *_ in together]
    first = [0, 1, 2, 0, 1, 5, 1, 0, 2, *[2, 2, 2, 2, 2, 14][: 6 * (not ahead)]]
    assert [keys.index(key) for key in keys] == first, "one operation each"
