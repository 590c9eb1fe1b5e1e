"""Plain steps that start before the previous one is read: the text stays the same."""

import copy
from unittest.mock import patch

import pytest
from bigrams import ScriptedTarget
from families import FAMILIES, family_target, plain_tokens, random_model, small_prompt, target_of
from launches import launches
from request_set import RequestSet, SteppedEngine
from simulated import policy_with_costs
from test_engine_batches import Allocator
from test_lookup import file_copy_task
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


class CountedForwards:
    """Counts the forwards that run while this context manager is open.

    Attributes:
        rows: the number of rows of each forward of a single request, without those of prompts.
        ahead: how many steps started before the previous one was read.
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
            assert not launches(step.choices), "the choices were not handed to the device earlier"
            keep(request, step, *rows_and_tokens)

        def committed(request, step, rows, tokens, ahead=None):
            self.ahead += ahead is not None
            return commit(request, step, rows, tokens, ahead)

        self.patches = (
            patch.object(Target, "forward", counted),
            patch.object(Request, "keep", kept),
            patch.object(Request, "commit", committed),
        )
        for patcher in self.patches:
            patcher.start()
        return self

    def __exit__(self, *_):
        for patcher in self.patches:
            patcher.stop()


def test_a_plain_step_starts_before_the_last_one_is_read():
    target = tiny_target()
    with CountedForwards() as forwards:
        events = dm.stream_generate(target, None, PROMPT, max_tokens=ANSWER)
        forwards_at_events = [len(forwards.rows) for _ in events]
    # The first token needs the prefill only. At the second, two steps have started, and so on. The
    # last step starts no other.
    assert forwards_at_events == [0, *range(2, ANSWER), ANSWER - 1]
    assert forwards.ahead == ANSWER - 2


def test_the_row_that_is_read_after_an_eos_token_is_kept_for_the_next_turn():
    """The step after the EOS token starts before the end is known.

    It costs one more forward, but the next turn reuses the EOS token's row.
    """
    tokens = greedy(tiny_target(), PROMPT, ANSWER)
    end = next(index for index in range(8, ANSWER) if tokens[index] not in tokens[:index])
    target = ending_at(tiny_target(), tokens[end])
    kept = dm.Conversation(target, None)
    with CountedForwards() as forwards:
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
    """The next turn differs from the answer in its last token, and all before it is reused.

    Only requests whose caches can be trimmed read ahead: others could not drop that row again.
    """
    model = random_model(family)
    target = target_of(model, family)
    kept = dm.Conversation(target, None)
    events = dm.stream_generate(target, None, PROMPT, max_tokens=30, conversation=kept)
    answer = [next(events).tokens[0] for _ in range(24)]
    reads_ahead = target.start().can_pipeline
    events.close()
    tokens_read = answer if reads_ahead else answer[:-1]
    assert kept.ids == [*PROMPT, *tokens_read]
    if reads_ahead:
        assert kept.caches.target_session.can_trim
    another_token = answer[-1] ^ 1  # any other token of the vocabulary
    diverging = [*PROMPT, *answer[:-1], another_token, 7, 8]
    result = dm.generate(target, None, diverging, max_tokens=3, conversation=kept)
    assert result.stats.reused_tokens == len(diverging) - 3
    assert result.tokens == plain_tokens(model, diverging, 3)
    continuing = [*diverging, *result.tokens, 7, 8]
    result = dm.generate(target, None, continuing, max_tokens=ANSWER, conversation=kept)
    assert result.stats.reused_tokens >= len(continuing) - 3
    assert result.tokens == plain_tokens(model, continuing, ANSWER)


def test_no_step_starts_early_with_a_penalty():
    """A penalty depends on the token before, which is not known yet when a step starts early."""
    target = tiny_target()
    with CountedForwards() as forwards:
        dm.generate(target, None, PROMPT, max_tokens=ANSWER, repetition_penalty=1.2)
    assert forwards.ahead == 0 and len(forwards.rows) == ANSWER - 1


@pytest.mark.parametrize("new_tokens", [60, 67])
def test_pipelining_delays_drafts_of_a_lookup_by_a_few_steps_only(new_tokens):
    """The answer is new for so long that lookups pause, and then repeats its prompt.

    A match that is found while a step is ahead can be drafted one token later only. That may cost
    10 % more steps.
    """
    file, repeated_file = file_copy_task()
    prompt = file[:200]
    answer = [*range(700, 700 + new_tokens), *repeated_file[:150]]
    rounds = {}
    for pipelined in (False, True):
        target = ScriptedTarget(prompt, answer, 1024)
        target.can_pipeline = pipelined
        policy = policy_with_costs(16, row=1 / 15, draft=0.0)
        settings = {"max_tokens": len(answer), "policy": policy}
        with CountedForwards() as forwards:
            drafted = dm.generate(target, LookupDrafter(), prompt, **settings)
        assert drafted.tokens == answer
        assert (forwards.ahead > 30) == pipelined
        rounds[pipelined] = drafted.stats.rounds
    assert rounds[False] <= rounds[True] <= 1.1 * rounds[False]


SIZES = (60, 9, 35)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
def test_a_batch_is_pipelined_while_requests_join_and_leave(family):
    """One, two, three requests together, then one again: each has the text it has alone."""
    target = family_target(family)
    prompts = [small_prompt(10 + index, index) for index in range(3)]
    settings = [{"temperature": 0.7, "seed": 2, "max_tokens": size} for size in SIZES]
    requests = RequestSet(target, list(zip(prompts, settings, strict=True)))
    engine = SteppedEngine(target, None, SharedBatch(target, None))
    jobs = []
    with CountedForwards() as forwards:
        for prompt, options in requests.requests:
            jobs.append(engine.submit(prompt, **options))
            for _ in range(6):
                engine.scheduler.step()
        engine.run()
    assert [job.result().tokens for job in jobs] == requests.alone
    # A shared step counts once for each of its requests. When one joins or leaves, the next step
    # cannot start early.
    if target.start().can_pipeline:
        assert forwards.ahead > 0.9 * sum(SIZES) - 6


@pytest.mark.parametrize("count", [1, 2])
def test_plain_steps_are_pipelined_where_drafting_never_pays(count):
    """A single request's policy decides so, and the batch's allocator for two."""
    target = tiny_target()
    size = 60
    prompts = [small_prompt(12, index) for index in range(count)]
    requests = RequestSet(target, [(prompt, {"max_tokens": size}) for prompt in prompts])
    policy = policy_with_costs(16, row=1.0, draft=16.0)
    batch = SharedBatch(target, Allocator(1.0, policy))
    engine = SteppedEngine(target, requests.oracle(0.0), batch)
    jobs = [engine.submit(prompt, policy=policy, max_tokens=size) for prompt in prompts]
    with CountedForwards() as forwards:
        engine.run()
    assert [job.result().tokens for job in jobs] == requests.alone
    assert forwards.ahead > 0.7 * count * size


def test_a_preempted_request_resumes_from_the_store_after_a_step_ahead(monkeypatch):
    """When it resumes, it finds all that it had read in the prefix store."""
    target = tiny_target()
    store = dm.PrefixStore(target, None, memory=2**28, chunk=8)
    engine = SteppedEngine(target, None, SharedBatch(target, None))
    job = engine.submit(PROMPT, max_tokens=ANSWER, prefix=store)
    for _ in range(10):
        engine.scheduler.step()
    tokens_read = []
    original_read = Target.read

    def recording_read(target, spans):
        for span in spans:
            tokens_read.extend(span.proposal.tokens)
        return original_read(target, spans)

    monkeypatch.setattr(Target, "read", recording_read)
    engine.scheduler.preempt()
    engine.run()
    assert job.result().tokens == greedy(target, PROMPT, ANSWER)
    assert len(tokens_read) == 2, "only the last two tokens are read after a prompt in the store"


class UserDrafter:
    """A user's drafter without features, which drafts nothing.

    A session counts the rows that it gets, and raises an error at each count in `fails_at`.
    """

    tap_layers = ()
    fails_at = ()

    def start(self, target, sampler):
        session = copy.copy(self)
        session.rows = 0
        return session

    def extend(self, taps):
        self.rows += taps.shape[1]
        if self.rows in self.fails_at:
            raise ValueError("the user's error")

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


def test_an_error_of_one_drafter_ends_only_its_request():
    """It is raised before the next round is computed, so the others need not read anything again.

    Only the second request, whose prompt is the longest, reaches the count that fails.
    """
    target = tiny_target()
    drafter = UserDrafter()
    prompts = [PROMPT, [*PROMPT, *PROMPT, *PROMPT], [*PROMPT, 8]]
    drafter.fails_at = (len(prompts[1]) + 1,)
    requests = RequestSet(target, [(prompt, {"max_tokens": 9}) for prompt in prompts])
    tokens_read = []

    class RecordingBatch(SharedBatch):
        def read(self, spans):
            for span in spans:
                tokens_read.extend(span.proposal.tokens)
            return super().read(spans)

    engine = SteppedEngine(target, drafter, RecordingBatch(target, None))
    jobs = [engine.submit(prompt, block_size=1, max_tokens=9) for prompt in prompts]
    engine.run()
    with pytest.raises(ValueError, match="the user's error"):
        jobs[1].result()
    assert jobs[0].result().tokens == requests.alone[0]
    assert jobs[2].result().tokens == requests.alone[2]
    assert len(tokens_read) == sum(map(len, prompts)), "no prompt is read twice"
