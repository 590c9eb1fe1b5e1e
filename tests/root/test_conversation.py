"""A conversation keeps its caches: each turn reads only new tokens, and its text is the same."""

import pytest
from families import FAMILIES, family_target, small_prompt
from oracle import Oracle
from request_set import TextOracle
from tinymodels import ending_at, random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.targets.session import LAST_STEP

ANSWER = 12
WINDOW = 16


def turn(target, drafter, prompt, conversation=None, **settings):
    """The result of one turn of the conversation, or of a fresh request if there is none."""
    return dm.generate(
        target, drafter, prompt, max_tokens=ANSWER, conversation=conversation, **settings
    )


# Families that are tested without a drafter as well: plain decoding writes single rows into a
# window in place.
PLAIN = ("qwen3", "gpt_oss", "gemma4_dense", "qwen3_5", "deepseek_v41")
FAMILIES_AND_ACCURACIES = [(name, 0.7) for name in FAMILIES] + [(name, None) for name in PLAIN]


@pytest.mark.parametrize(("family", "p"), FAMILIES_AND_ACCURACIES)
def test_a_turn_reads_only_what_is_new(family, p):
    """On every family, with texts longer than every window.

    The fourth prompt changes the end of the third, and the fifth keeps only the first 20 tokens of
    the fourth. The last token of an answer is new to the next turn: no forward has read it yet.

    `p` is how often a draft is right; with None nothing is drafted.
    """
    target = family_target(family)
    drafter = None if p is None else TextOracle([], target.vocab_size, p)
    kept = dm.Conversation(target, drafter)
    tokens_read = []
    prompt = small_prompt(30, seed=1)
    for number in range(5):
        plain = turn(target, None, prompt)
        if drafter is not None:
            drafter.texts.append([*prompt, *plain.tokens])
        result = turn(target, drafter=drafter, prompt=prompt, conversation=kept, block_size=6)
        text = [*prompt, *plain.tokens]
        assert result.tokens == plain.tokens
        assert kept.ids == text[:-1]
        tokens_read.append(len(prompt) - result.stats.reused_tokens)
        if number == 2:
            beginning = prompt[:-3]
        elif number == 3:
            beginning = prompt[:20]
        else:
            beginning = text
        prompt = [*beginning, *small_prompt(9, seed=2 + number)]
    # The second and third turn read the last answer's last token and 9 new ones.
    assert tokens_read[:3] == [30, 10, 10]
    assert tokens_read[3] < len(prompt) / 2


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("qwen3", None),
        ("qwen3", WINDOW),
        ("gpt_oss", None),
        ("gpt_oss", WINDOW),
        ("qwen3_next", None),
    ],
)
def test_asking_again_reads_only_the_end_of_the_prompt(family, window):
    """Each prompt is asked twice, then with another end. It grows by a little, then by a lot."""
    layers = {"num_hidden_layers": 4} if family == "qwen3_next" else {}
    target = tiny_target(family, **layers)
    sliding = {"sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    drafter = random_drafter(num_target_layers=target.num_layers, **(sliding if window else {}))
    kept = dm.Conversation(target, drafter)
    prompt = small_prompt(200, seed=1)
    for added_tokens in (20, 150, 0):
        other_end = [*prompt[:-3], *small_prompt(5, seed=added_tokens)]
        results = []
        for question in (prompt, prompt, other_end):
            result = turn(target, drafter=drafter, prompt=question, conversation=kept)
            assert result.tokens == turn(target, None, question).tokens
            results.append(result)
        reused = [result.stats.reused_tokens for result in results[1:]]
        assert len(prompt) - min(reused) <= LAST_STEP
        new = small_prompt(added_tokens, seed=added_tokens)
        prompt = [*other_end, *results[-1].tokens, *new]


@pytest.mark.parametrize("trees", [{}, {"tree_budget": 12}], ids=["chains", "trees"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_drafters_draft_in_a_conversation_as_in_a_fresh_request(window, trees):
    """Each step accepts as many drafts as in a fresh request.

    That holds as well after the third prompt (number 2), which drops the end of the second.
    """
    sliding = {"sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    target = tiny_target()
    drafter = random_drafter(**(sliding if window else {}))
    kept = dm.Conversation(target, drafter)
    prompt = small_prompt(20, seed=3)
    for number in range(4):
        fresh = turn(target, drafter, prompt, temperature=0.8, seed=number, **trees)
        result = turn(
            target,
            drafter=drafter,
            prompt=prompt,
            conversation=kept,
            temperature=0.8,
            seed=number,
            **trees,
        )
        assert result.tokens == fresh.tokens
        assert result.stats.accepted_per_round == fresh.stats.accepted_per_round
        assert result.stats.reused_tokens > 0 or number == 0
        beginning = prompt[:-2] if number == 1 else [*prompt, *result.tokens]
        prompt = [*beginning, *small_prompt(5, seed=number)]


def test_a_conversation_keeps_no_drafts_after_the_end_of_an_answer():
    """The EOS token falls inside a block whose further drafts are right as well."""
    target = tiny_target()
    prompt = small_prompt(10, seed=4)
    answer = turn(target, None, prompt).tokens
    end = next(index for index in range(4, 9) if answer[index] not in answer[:index])
    ending = ending_at(target, answer[end])
    oracle = TextOracle([[*prompt, *answer]], target.vocab_size, 1.0)
    kept = dm.Conversation(ending, oracle)
    result = turn(ending, drafter=oracle, prompt=prompt, conversation=kept, block_size=16)
    assert result.tokens == answer[: end + 1]
    assert kept.ids == [*prompt, *answer[:end]]


def test_caches_of_an_interrupted_forward_are_not_reused():
    target = tiny_target()
    kept = dm.Conversation(target, None)
    prompt = small_prompt(10, seed=6)
    turn(target, drafter=None, prompt=prompt, conversation=kept)
    kept.caches.target_session.verify(dm.Proposal([1, 2]))  # without commit, as after Ctrl-C
    result = turn(target, drafter=None, prompt=prompt, conversation=kept)
    assert result.stats.reused_tokens == 0
    assert result.tokens == turn(target, None, prompt).tokens


def test_a_drafter_that_cannot_resume_reads_everything_again():
    """`Oracle`'s session has no way to go back, so nothing is reused."""
    target = tiny_target()
    prompt = small_prompt(10, seed=7)
    answer = turn(target, None, prompt).tokens
    oracle = Oracle(prompt, answer=answer, vocab_size=target.vocab_size, p=0.5)
    kept = dm.Conversation(target, oracle)
    assert turn(target, drafter=oracle, prompt=prompt, conversation=kept).tokens == answer
    oracle.taps.clear()
    again = turn(target, drafter=oracle, prompt=prompt, conversation=kept)
    assert again.tokens == answer and again.stats.reused_tokens == 0


def test_a_conversation_of_another_pair_or_kv_bits_is_refused():
    target = tiny_target()
    kept = dm.Conversation(target, None)
    with pytest.raises(SettingsError, match="of another target"):
        dm.generate(tiny_target("llama"), None, [1, 2], conversation=kept)
    with pytest.raises(SettingsError, match="of another drafter"):
        dm.generate(target, random_drafter(), [1, 2], conversation=kept)
    with pytest.raises(SettingsError, match="of kv_bits=None"):
        dm.generate(target, None, [1, 2], conversation=kept, kv_bits=8)
