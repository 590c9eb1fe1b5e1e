"""Plain steps that start before the last one is read: the same text, and the device never waits."""

import copy
from unittest.mock import patch

import pytest
from bigrams import Scripted
from families import FAMILIES, family_target, plain_tokens, random_model, small_prompt, target_of
from launches import launches
from request_set import RequestSet, SteppedEngine
from simulated import policy_with_costs
from test_engine_batches import Allocator
from test_lookup import copying
from test_threads import in_a_thread
from tinymodels import ending_at, greedy
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.request import Request
from dflash_mlx.targets import Target

ANSWER = 24
PROMPT = small_prompt(12, 3)


class Forwards:
    """Counts the forwards inside.

    Attributes:
        rows: the number of rows of each forward of a single request, prompts left out.
        ahead: steps that started before the last one was read.
    """

    def __init__(self):
        self.rows = []
        self.ahead = 0

    def __enter__(self):
        forward = Target.forward
        keep = Request.keep
        commit = Request.commit

        def counted(target, rows, logits="all"):
            if not rows.is_prompt and not rows.is_shared:
                self.rows.append(len(rows))
            return forward(target, rows, logits)

        def kept(request, step, *rows_and_tokens):
            assert not launches(step.choices), "the device must have started on these rows before"
            keep(request, step, *rows_and_tokens)

        def committed(request, step, rows, tokens, ahead=None):
            self.ahead += ahead is not None
            return commit(request, step, rows, tokens, ahead)

        self.patches = (
            patch.object(Target, "forward", counted),
            patch.object(Request, "keep", kept),
            patch.object(Request, "commit", committed),
        )
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()


def test_a_plain_step_starts_before_the_last_one_is_read():
    target = tiny_target()
    with Forwards() as forwards:
        events = dm.stream_generate(target, None, PROMPT, max_tokens=ANSWER)
        begun = [len(forwards.rows) for _ in events]
    # The prefill brings the first token, and the last step starts no other.
    assert begun == [0, *range(2, ANSWER), ANSWER - 1]
    assert forwards.ahead == ANSWER - 2


def test_the_end_of_a_text_costs_one_forward_whose_row_is_kept():
    """A step reads the EOS token before its end is known; the next turn reuses that row."""
    tokens = greedy(tiny_target(), PROMPT, ANSWER)
    end = next(index for index in range(8, ANSWER) if tokens[index] not in tokens[:index])
    target = ending_at(tiny_target(), tokens[end])
    kept = dm.Conversation(target, None)
    with Forwards() as forwards:
        result = dm.generate(target, None, PROMPT, max_tokens=ANSWER, conversation=kept)
    assert result.tokens == tokens[: end + 1] and result.finish_reason == "stop"
    assert len(forwards.rows) == end + 1
    assert kept.ids == [*PROMPT, *result.tokens]
    again = [*kept.ids, 5, 6]
    result = dm.generate(target, None, again, max_tokens=ANSWER, conversation=kept)
    assert result.stats.reused_tokens == len(again) - 2
    assert result.tokens == greedy(target, again, ANSWER)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_continues_after_an_answer_that_was_closed_early(family):
    """Only caches that can be trimmed read ahead: others could not forget the token again."""
    model = random_model(family)
    target = target_of(model, family)
    kept = dm.Conversation(target, None)
    events = dm.stream_generate(target, None, PROMPT, max_tokens=30, conversation=kept)
    begun = [next(events).tokens[0] for _ in range(24)]
    ahead = target.start().can_pipeline
    events.close()
    read = begun if ahead else begun[:-1]
    assert kept.ids == [*PROMPT, *read]
    assert kept.caches.target_session.can_trim or not ahead
    another_token = begun[23] ^ 1
    diverging = [*PROMPT, *begun[:23], another_token, 7, 8]
    result = dm.generate(target, None, diverging, max_tokens=3, conversation=kept)
    assert result.stats.reused_tokens == len(diverging) - 3
    assert result.tokens == plain_tokens(model, diverging, 3)
    continuing = [*diverging, *result.tokens, 7, 8]
    result = dm.generate(target, None, continuing, max_tokens=ANSWER, conversation=kept)
    assert result.stats.reused_tokens >= len(continuing) - 3
    assert result.tokens == plain_tokens(model, continuing, ANSWER)


def test_no_step_starts_early_with_a_penalty():
    target = tiny_target()
    with Forwards() as forwards:
        dm.generate(target, None, PROMPT, max_tokens=ANSWER, repetition_penalty=1.2)
    assert forwards.ahead == 0 and len(forwards.rows) == ANSWER - 1


@pytest.mark.parametrize("new", [60, 67])
def test_what_a_lookup_finds_during_a_step_ahead_is_drafted_a_token_later(new):
    """An answer that is new for so long that lookups pause, and then repeats its prompt."""
    file, copy = copying()
    prompt = file[:200]
    answer = [*range(700, 700 + new), *copy[:150]]
    rounds = []
    for ahead in (False, True):
        subject = Scripted(prompt, answer, 1024)
        subject.can_pipeline = ahead
        policy = policy_with_costs(16, row=1 / 15, draft=0.0)
        settings = {"max_tokens": len(answer), "policy": policy}
        with Forwards() as forwards:
            drafted = dm.generate(subject, LookupDrafter(), prompt, **settings)
        assert drafted.tokens == answer
        assert (forwards.ahead > 30) == ahead
        rounds.append(drafted.stats.rounds)
    assert rounds[0] <= rounds[1] <= 1.1 * rounds[0]


SIZES = (60, 9, 35)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
def test_many_are_pipelined_together_whoever_comes_and_goes(family):
    """One, two, three requests together, then one again: each has the text it has alone."""
    target = family_target(family)
    settings = {"temperature": 0.7, "seed": 2}
    prompts = [small_prompt(10 + index, index) for index in range(3)]
    each = [settings | {"max_tokens": size} for size in SIZES]
    crowd = RequestSet(target, list(zip(prompts, each, strict=True)))
    played = SteppedEngine(target, None, SharedBatch(target, None))
    jobs = []
    with Forwards() as forwards:
        for prompt, options in crowd.requests:
            jobs.append(played.submit(prompt, **options))
            for _ in range(6):
                played.scheduler.step()
        played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    # A forward of many is counted for each of them; newcomers and ends begin anew.
    assert not target.start().can_pipeline or forwards.ahead > 0.9 * sum(SIZES) - 6


@pytest.mark.parametrize("many", [1, 2])
def test_plain_steps_are_pipelined_where_drafting_never_pays(many):
    """By the policy of one request alone, or by the batch's."""
    target = tiny_target()
    size = 60
    prompts = [small_prompt(12, index) for index in range(many)]
    crowd = RequestSet(target, [(prompt, {"max_tokens": size}) for prompt in prompts])
    policy = policy_with_costs(16, row=1.0, draft=16.0)
    played = SteppedEngine(target, crowd.oracle(0.0), SharedBatch(target, Allocator(1.0, policy)))
    jobs = [played.submit(prompt, policy=policy, **settings) for prompt, settings in crowd.requests]
    with Forwards() as forwards:
        played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    assert forwards.ahead > 0.7 * many * size


def test_a_preempted_request_resumes_from_the_store_after_a_step_ahead(monkeypatch):
    """A preempted request finds all that it has read in the store when it resumes."""
    target = tiny_target()
    store = dm.PrefixStore(target, None, memory=2**28, chunk=8)
    played = SteppedEngine(target, None, SharedBatch(target, None))
    job = played.submit(PROMPT, max_tokens=ANSWER, prefix=store)
    for _ in range(10):
        played.scheduler.step()
    read = []
    target_read = Target.read

    def counted(target, spans):
        read.extend(token for span in spans for token in span.proposal.tokens)
        return target_read(target, spans)

    monkeypatch.setattr(Target, "read", counted)
    played.scheduler.preempt()
    played.run()
    assert job.result().tokens == greedy(target, PROMPT, ANSWER)
    assert len(read) == 2, "as after every prompt that the store has"


class UserDrafter:
    """A user's drafter without features: a session counts rows and fails at a count in `breaks`."""

    tap_layers = ()
    breaks = ()

    def start(self, target, sampler):
        session = copy.copy(self)
        session.extended = 0
        return session

    def extend(self, taps):
        self.extended += taps.shape[1]
        if self.extended in self.breaks:
            raise ValueError("mine")

    def propose(self, anchor, width):
        return dm.Proposal([anchor])


def test_a_pipelined_step_is_read_and_closed_in_any_thread():
    target = tiny_target()
    tokens = []
    events = dm.stream_generate(target, UserDrafter(), PROMPT, max_tokens=ANSWER, block_size=1)
    for _ in range(12):
        tokens += in_a_thread(lambda: next(events)).tokens
    in_a_thread(events.close)
    assert tokens == greedy(target, PROMPT, 12)


def test_an_error_of_one_drafter_ends_its_request_alone():
    """It comes before the next round is computed, so the others need not read anything again."""
    target = tiny_target()
    drafter = UserDrafter()
    prompts = [PROMPT, [*PROMPT, *PROMPT, *PROMPT], [*PROMPT, 8]]
    drafter.breaks = (len(prompts[1]) + 1,)
    crowd = RequestSet(target, [(prompt, {"max_tokens": 9}) for prompt in prompts])
    read = []

    class Counted(SharedBatch):
        def read(self, ends):
            read.extend(token for end in ends for token in end.proposal.tokens)
            return super().read(ends)

    played = SteppedEngine(target, drafter, Counted(target, None))
    jobs = [played.submit(prompt, block_size=1, **settings) for prompt, settings in crowd.requests]
    played.run()
    with pytest.raises(ValueError, match="mine"):
        jobs[1].result()
    assert [jobs[index].result().tokens for index in (0, 2)] == [crowd.alone[0], crowd.alone[2]]
    assert len(read) == sum(map(len, prompts)), "nobody has to read again"
