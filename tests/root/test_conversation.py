"""A conversation keeps its caches: every turn reads only what is new, and its text is the same."""

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
    return dm.generate(
        target, drafter, prompt, max_tokens=ANSWER, conversation=conversation, **settings
    )


# Decoded without a drafter as well: single rows are written into a window in place.
PLAIN = ("qwen3", "gpt_oss", "gemma4_dense", "qwen3_5", "deepseek_v41")


@pytest.mark.parametrize(
    ("family", "p"), [*((name, 0.7) for name in FAMILIES), *((name, None) for name in PLAIN)]
)
def test_a_turn_reads_only_what_is_new(family, p):
    """On every family, and beyond every window.

    The fourth prompt changes the end of the third, and the fifth keeps only 20 of the first tokens.
    The last token of an answer is new to the next turn: no forward has read it yet.
    """
    target = family_target(family)
    drafter = None if p is None else TextOracle([], target.vocab_size, p)
    kept = dm.Conversation(target, drafter)
    read = []
    prompt = small_prompt(30, seed=1)
    for number in range(5):
        plain = turn(target, None, prompt)
        if drafter is not None:
            drafter.texts.append([*prompt, *plain.tokens])
        result = turn(target, drafter=drafter, prompt=prompt, conversation=kept, block_size=6)
        assert result.tokens == plain.tokens
        assert kept.ids == [*prompt, *plain.tokens][:-1]
        read.append(len(prompt) - result.stats.reused_tokens)
        begun = {2: prompt[:-3], 3: prompt[:20]}.get(number, [*prompt, *plain.tokens])
        prompt = [*begun, *small_prompt(9, seed=2 + number)]
    assert read[:3] == [30, 10, 10]
    assert read[3] < len(prompt) / 2


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
def test_asking_again_reads_the_end_of_the_prompt_only(family, window):
    """Each prompt is asked twice, then with another end. It grows by a little, then by a lot."""
    sliding = {"sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    target = tiny_target(family, num_hidden_layers=4) if "next" in family else tiny_target(family)
    drafter = random_drafter(num_target_layers=target.num_layers, **(sliding if window else {}))
    kept = dm.Conversation(target, drafter)
    prompt = small_prompt(200, seed=1)
    for length in (20, 150, 0):
        other = [*prompt[:-3], *small_prompt(5, seed=length)]
        results = [
            turn(target, drafter=drafter, prompt=asked, conversation=kept)
            for asked in (prompt, prompt, other)
        ]
        for result, asked in zip(results, (prompt, prompt, other), strict=True):
            assert result.tokens == turn(target, None, asked).tokens
        reused = [result.stats.reused_tokens for result in results[1:]]
        assert len(prompt) - min(reused) <= LAST_STEP
        prompt = [*other, *results[-1].tokens, *small_prompt(length, seed=length)]


@pytest.mark.parametrize("trees", [{}, {"tree_budget": 12}], ids=["chains", "trees"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_drafters_draft_in_a_conversation_as_in_a_fresh_request(window, trees):
    """Each round accepts as many drafts as in a fresh request, also after a prompt went back."""
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
        whole = [*prompt, *result.tokens]
        prompt = [*(prompt[:-2] if number == 1 else whole), *small_prompt(5, seed=number)]


def test_a_conversation_keeps_nothing_after_the_end_of_an_answer():
    target = tiny_target()
    prompt = small_prompt(10, seed=4)
    answer = turn(target, None, prompt).tokens
    end = next(index for index in range(4, 9) if answer[index] not in answer[:index])
    ending = ending_at(target, answer[end])
    oracle = TextOracle([[*prompt, *answer]], target.vocab_size, 1.0)
    kept = dm.Conversation(ending, oracle)
    assert (
        turn(ending, drafter=oracle, prompt=prompt, conversation=kept, block_size=16).tokens
        == answer[: end + 1]
    )
    assert kept.ids == [*prompt, *answer[:end]]


def test_caches_of_an_interrupted_forward_are_not_trusted():
    target = tiny_target()
    kept = dm.Conversation(target, None)
    prompt = small_prompt(10, seed=6)
    turn(target, drafter=None, prompt=prompt, conversation=kept)
    kept.caches.target_session.verify(dm.Proposal([1, 2]))  # no commit: as if Ctrl-C came
    result = turn(target, drafter=None, prompt=prompt, conversation=kept)
    assert result.stats.reused_tokens == 0
    assert result.tokens == turn(target, None, prompt).tokens


def test_a_drafter_that_cannot_resume_reads_everything_again():
    target = tiny_target()
    prompt = small_prompt(10, seed=7)
    answer = turn(target, None, prompt).tokens
    oracle = Oracle(prompt, answer=answer, vocab_size=target.vocab_size, p=0.5)
    kept = dm.Conversation(target, oracle)
    assert turn(target, drafter=oracle, prompt=prompt, conversation=kept).tokens == answer
    oracle.taps.clear()
    again = turn(target, drafter=oracle, prompt=prompt, conversation=kept)
    assert again.tokens == answer and again.stats.reused_tokens == 0


def test_another_pair_is_refused():
    target = tiny_target()
    other = tiny_target("llama")
    kept = dm.Conversation(target, None)
    for *pair, told in (
        (other, None, None, "of another target"),
        (target, random_drafter(), None, "of another drafter"),
        (target, None, 8, "of kv_bits=None"),
    ):
        with pytest.raises(SettingsError, match=told):
            dm.generate(*pair[:2], [1, 2], conversation=kept, kv_bits=pair[2])
