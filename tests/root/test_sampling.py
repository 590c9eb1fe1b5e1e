"""Sampling: the distribution after all filters, the noise, and requests sampled together."""

import math
from fractions import Fraction

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget, softmax

import dflash_mlx as dm
from dflash_mlx.distributions import gumbel, keep_min_p, keep_top_k, keep_top_p
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Sampler, sample
from dflash_mlx.settings import RequestSettings

VOCABULARIES = [16, 200]
HIGHEST_Z = 3.09  # a standard normal variable exceeds it with a probability of 1e-3


def chi_square_z(observed, expected):
    """The z-score of Pearson's chi-square statistic, by Wilson and Hilferty's approximation.

    Cells that expect fewer than five observations are put together.
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
    """The distribution after each filter in turn, in numpy: what mlx-lm's samplers sample from."""
    p = softmax(logits)
    order = np.argsort(-p, kind="stable")
    if top_p < 1:
        p[order[1:][np.cumsum(p[order])[:-1] >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    if top_k:
        p[order[top_k:]] = 0
    p = p ** (1 / temperature)
    return p / p.sum()


def sample_rows(sampler, logits):
    """The tokens that are sampled after each row of a chain, whose own tokens do not matter."""
    chain = Proposal([0] * len(logits))
    return sample([sampler.rows(chain, logits.shape[-1])], logits).tolist()


FILTERS = [{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}]
FILTERS.append({"top_p": 0.95, "top_k": 12, "min_p": 0.01})


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.3])
def test_next_tokens_follow_the_processed_distribution(vocabulary, filters, temperature):
    """5,000 tokens are sampled from the same logits, each at another position."""
    logits = 2 * np.random.default_rng(vocabulary).normal(size=vocabulary)
    rows = 5000
    settings = RequestSettings(temperature=temperature, seed=vocabulary, **filters)
    equal_rows = mx.broadcast_to(mx.array(logits, mx.float32), (rows, vocabulary))
    tokens = sample_rows(Sampler(settings), equal_rows)
    observed = np.bincount(tokens, minlength=vocabulary)
    expected = rows * processed(logits, temperature, **filters)
    assert chi_square_z(observed, expected) < HIGHEST_Z


@pytest.mark.parametrize("vocabulary", [16, 200])
@pytest.mark.parametrize("drafts", [False, True])
def test_two_tokens_follow_the_joint_distribution(vocabulary, drafts):
    """Whole requests with thousands of seeds: drafts must not change the distribution.

    The prefill chooses the token before the two, which the table forces to be 0.
    """
    table = 2 * np.random.default_rng(vocabulary).normal(size=(vocabulary, vocabulary))
    # Token 0 always follows token 1, which is the prompt.
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
    joint_probabilities = rows[0][:, None] * rows
    assert chi_square_z(counts, seeds * joint_probabilities) < HIGHEST_Z
    assert (accepted > seeds / 3) == drafts


def test_noise_is_independent_across_positions_and_seeds():
    """No two rows of noise are correlated, nor is a row with itself, shifted by a few tokens."""
    rows = 64
    vocabulary = 2000
    noise_of_seed = {}
    for seed in (0, 1, 2, 40):
        keys = [(seed, position) for position in range(rows)]
        noise_of_seed[seed] = np.array(gumbel(keys, vocabulary))
    limit = 4.5 / vocabulary**0.5  # 4.5 standard deviations

    def correlation(first, second):
        return np.corrcoef(first, second)[0, 1]

    for noise in noise_of_seed.values():
        between_positions = np.corrcoef(noise)[~np.eye(rows, dtype=bool)]
        assert np.abs(between_positions).max() < limit
        shifted = [correlation(row[:-lag], row[lag:]) for row in noise for lag in (1, 2)]
        assert np.abs(shifted).max() < limit
    for position in range(9):
        for other_position in range(9):
            first = noise_of_seed[0][position]
            second = noise_of_seed[1][other_position]
            assert abs(correlation(first, second)) < limit
    # Seed 2 at position 40, and seed 40 at position 2.
    assert abs(correlation(noise_of_seed[2][40], noise_of_seed[40][2])) < limit


def test_noise_is_gumbel():
    noise = np.array(gumbel([(9, index) for index in range(100)], 2000)).astype(np.float64)
    uniform = np.sort(np.exp(-np.exp(-noise)), axis=None)
    steps = np.arange(1, len(uniform) + 1) / len(uniform)
    assert np.abs(uniform - steps).max() < 1.95 / len(uniform) ** 0.5  # Kolmogorov, p > 1e-3


@pytest.mark.parametrize("vocabulary", [17, 192, 1000])
def test_noise_of_a_position_does_not_depend_on_which_rows_are_drawn_with_it(vocabulary):
    together = gumbel([(3, 100 + index) for index in range(16)], vocabulary)
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
        assert sample_rows(sampler, logits) == [1, 0, 2]
        assert sampler.seed is None and sampler.draft(logits).tolist() == [1, 0, 2]


def test_equal_seeds_give_equal_texts():
    """A request without a seed reports the one that it drew."""
    target = BigramTarget(np.zeros((192, 192)))
    settings = {"temperature": 1.0, "max_tokens": 24}
    texts = [dm.generate(target, None, [1], seed=seed, **settings).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    fresh = dm.generate(target, None, [1], **settings)
    again = dm.generate(target, None, [1], seed=fresh.stats.seed, **settings)
    assert again.tokens == fresh.tokens


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-40, 1e-3])
def test_the_smallest_top_p_keeps_the_likeliest_token(top_p):
    """The first two values are 0 in float32, which would remove even the most likely token."""
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
    greedy = sample_rows(Sampler(RequestSettings()), logits)
    cold = sample_rows(Sampler(RequestSettings(temperature=temperature, seed=1)), logits)
    assert cold == greedy


def test_settings_may_be_numbers_of_numpy_and_fractions():
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


class AlternatingParity:
    """A constraint: even and odd tokens alternate, and the first is even."""

    def follows(self, answer, tokens):
        for index, token in enumerate(tokens):
            if token % 2 != (len(answer) + index) % 2:
                return index
        return len(tokens)

    def allowed(self, answer):
        return np.arange(30) % 2 == len(answer) % 2

    def __call__(self, tokens, logits):
        raise AssertionError("constraints are not called")


def negate(tokens, logits):
    """A logits processor of a user."""
    return -logits


# Settings of a request, how many tokens it drafts, and the index of the first request that is
# sampled in the same operation.
SAMPLED_TOGETHER = [
    ({}, 0, 0),
    ({"temperature": 0.7, "seed": 1}, 0, 1),
    ({"logit_bias": {3: 2.0}}, 0, 2),
    ({}, 0, 0),
    ({"temperature": 0.7, "seed": 2}, 0, 1),
    ({"temperature": 0.7, "seed": 1, "top_k": 5}, 0, 5),
    ({"temperature": 0.7, "seed": 2}, 4, 1),
    ({}, 4, 0),
    ({"logit_bias": {5: 1.5, 7: -1.0, 3: 4.0}}, 3, 2),
]
# These need the token before, so they cannot be sampled one step ahead.
NEEDING_THE_LAST_TOKEN = [
    ({"frequency_penalty": 0.6}, 2, 2),
    ({"presence_penalty": 1.0}, 0, 2),
    ({"logits_processors": [negate]}, 3, 2),
    ({"repetition_penalty": 1.3}, 0, 2),
    ({"logits_processors": [AlternatingParity()]}, 2, 2),
    ({"logits_processors": [AlternatingParity()], "temperature": 0.7, "seed": 2}, 4, 14),
]


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_sampled_together_choose_the_same_tokens(ahead):
    """Greedy and sampled rows, plain and drafted ones, equal settings and others, in one call."""
    vocabulary = 30
    cases = SAMPLED_TOGETHER if ahead else SAMPLED_TOGETHER + NEEDING_THE_LAST_TOKEN

    def requests():
        for number, (settings, count, _) in enumerate(cases):
            sampler = Sampler(RequestSettings(**settings), [1] * number)
            proposal = Proposal([2])
            if count:
                draft_logits = mx.random.normal((count, vocabulary), key=mx.random.key(number))
                drafts = sampler.draft(draft_logits).astype(mx.int32)
                proposal = Proposal(mx.concatenate([mx.array([2]), drafts]))
            key = mx.random.key(99 + number)
            yield sampler, proposal, mx.random.normal((len(proposal), vocabulary), key=key)

    separate = []
    for sampler, proposal, logits in requests():
        separate += sample([sampler.rows(proposal, vocabulary, ahead)], logits).tolist()
    together = list(requests())
    rows = [sampler.rows(proposal, vocabulary, ahead) for sampler, proposal, _ in together]
    all_logits = mx.concatenate([logits for *_, logits in together])
    assert sample(rows, all_logits).tolist() == separate
    assert sample(rows, all_logits).tolist() == separate, "sampling again"
    groups = [sampler.group for sampler, *_ in together]
    first_of_group = [groups.index(group) for group in groups]
    assert first_of_group == [first for *_, first in cases]
