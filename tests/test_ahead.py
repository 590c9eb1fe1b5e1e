"""Plain rounds that the round before has begun: the same text, and the device never waits."""

import copy
from unittest.mock import patch

import pytest
from crowd import Crowd, Played
from families import FAMILIES, plain_tokens, random_model, random_prompt, target_of
from launches import launches
from oracle import Oracle
from scripted import Scripted
from test_engine_rows import shared_costs
from test_lookup import copying
from test_threads import in_a_thread
from tinymodels import ending_at, greedy, random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.drafter.lookup import LookupDrafter
from dflash_mlx.engine.rows import SharedRounds
from dflash_mlx.engine.together import Flat
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.rest import LONGEST
from dflash_mlx.policy.watch import Watch
from dflash_mlx.policy.widths import Policy
from dflash_mlx.request import Request
from dflash_mlx.sampling import Sampler
from dflash_mlx.targets import TargetSession

ANSWER = 24
PROMPT = [token % 192 for token in random_prompt(12, 3)]


class Forwards:
    """What is forwarded inside.

    Attributes:
        rows: of all forwards of one request.
        ahead: rows that were begun ahead, in forwards of one or of many.
        looks: for each forward and request whether the target's certainty was asked for.
    """

    def __init__(self):
        self.rows, self.ahead, self.looks = [], 0, ""

    def __enter__(self):
        verify, begin_next = TargetSession.verify, Request.begin_next
        decide, next_row = Sampler.decide, Request.next_row

        def counted(session, proposal):
            self.rows.append(len(proposal))
            return verify(session, proposal)

        def counted_ahead(request, *of):
            self.ahead += 1
            return begin_next(request, *of)

        def looked_at(sampler, proposal, logits, certainty=False, ahead=0):
            self.looks += "L" if certainty else "."
            return decide(sampler, proposal, logits, certainty, ahead)

        def begun(request):
            row = next_row(request)
            assert not launches(row.tokens), "what it follows from is computed before, without it"
            return row

        self.patches = (
            patch.object(TargetSession, "verify", counted),
            patch.object(Request, "begin_next", counted_ahead),
            patch.object(Request, "next_row", begun),
            patch.object(Sampler, "decide", looked_at),
        )
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()


def test_a_plain_round_is_begun_before_the_last_one_is_read():
    target = tiny_target()
    with Forwards() as forwards:
        events = dm.stream_generate(target, None, PROMPT, max_tokens=ANSWER)
        begun = [len(forwards.rows) for _ in events]
    # The prefill brings the first token, and the round of the last token begins no other.
    assert begun == [0, *range(2, ANSWER), ANSWER - 1]
    assert forwards.ahead == ANSWER - 2


def test_the_end_of_a_text_costs_one_forward_at_most_and_its_row_is_kept():
    """The end is not foreseen, so the row of the EOS token has been read; the next turn has it."""
    tokens = greedy(tiny_target(), PROMPT, ANSWER)
    end = next(at for at in range(8, ANSWER) if tokens[at] not in tokens[:at])
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
def test_a_text_that_is_left_in_the_middle_can_be_gone_on_with(family):
    """Only what can be cut is read ahead: else a next turn that goes on otherwise had nothing."""
    model = random_model(family)
    target = target_of(model, family)
    kept = dm.Conversation(target, None)
    events = dm.stream_generate(target, None, PROMPT, max_tokens=60, conversation=kept)
    begun = [next(events).tokens[0] for _ in range(40)]
    ahead = target.start().can_pipeline
    events.close()
    assert kept.ids == [*PROMPT, *begun[: 40 if ahead else 39]]
    assert kept.target.can_trim or not ahead
    again = [*PROMPT, *begun[:39], begun[39] ^ 1, 7, 8]
    result = dm.generate(target, None, again, max_tokens=3, conversation=kept)
    assert result.stats.reused_tokens == len(again) - 3
    assert result.tokens == plain_tokens(model, again, 3)
    again = [*again, *result.tokens, 7, 8]
    result = dm.generate(target, None, again, max_tokens=ANSWER, conversation=kept)
    assert result.stats.reused_tokens >= len(again) - 3
    assert result.tokens == plain_tokens(model, again, ANSWER)


def useless() -> Policy:
    """A policy of a pair whose drafts cost as much as all that they could bring."""
    return Policy(Costs({64: {1: 1.0, 16: 16.0}}, {64: {1: 0.0, 16: 16.0}}), 16)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounds_of_rest_are_begun_ahead(temperature):
    target, settings = tiny_target(), {"max_tokens": 100, "temperature": temperature, "seed": 4}
    with patch.object(Sampler, "can_pipeline", False), Forwards() as alone:
        plain = dm.generate(target, None, PROMPT, **settings)
    assert alone.ahead == 0
    assert dm.generate(target, None, PROMPT, **settings).tokens == plain.tokens
    with Forwards() as forwards:
        drafted = dm.generate(target, random_drafter(), PROMPT, policy=useless(), **settings)
    assert drafted.tokens == plain.tokens
    # All but the first looks are begun ahead, and those at which the target's doubt has eased.
    assert forwards.ahead > 0.8 * drafted.stats.rounds
    assert max(map(len, forwards.looks.split("L"))) == LONGEST - 1


def test_a_tokens_history_has_to_be_on_the_host():
    target = tiny_target()
    with Forwards() as forwards:
        dm.generate(target, None, PROMPT, max_tokens=ANSWER, repetition_penalty=1.2)
    assert forwards.ahead == 0 and len(forwards.rows) == ANSWER - 1


@pytest.mark.parametrize("new", range(60, 60 + LONGEST + 1))
def test_what_a_lookup_finds_meanwhile_is_drafted_a_token_later(new):
    """A text that is new for so long that nobody looks any more, and then repeats its prompt."""
    file, copy = copying()
    prompt, answer = file[:200], [*range(700, 700 + new), *copy[:150]]
    rounds = []
    for ahead in (False, True):
        subject = Scripted(prompt, answer, 1024)
        subject.can_pipeline = ahead
        policy = Policy(Costs({64: {1: 1.0, 16: 2.0}}, {64: {1: 0.0, 16: 0.0}}), 16)
        settings = {"max_tokens": len(answer), "policy": policy}
        with Forwards() as forwards:
            drafted = dm.generate(subject, LookupDrafter(), prompt, **settings)
        assert drafted.tokens == answer
        assert (forwards.ahead > 30) == ahead
        rounds.append(drafted.stats.rounds)
    assert rounds[0] <= rounds[1] <= rounds[0] + 2


SIZES = (60, 9, 35)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
@pytest.mark.parametrize("policy", [False, True])
def test_many_go_ahead_together_whoever_comes_and_goes(family, policy):
    """One alone, two and three together, and one alone again: all texts are those alone."""
    target = target_of(random_model(family), family)
    settings = {"temperature": 0.7, "seed": 2}
    prompts = [[token % 192 for token in random_prompt(10 + at, at)] for at in range(3)]
    each = [settings | {"max_tokens": size} for size in SIZES]
    crowd = Crowd(target, list(zip(prompts, each, strict=True)))
    rounds = SharedRounds(shared_costs(1.0, 1.0, 16.0)) if policy else None
    drafter = crowd.knowing(0.0) if policy else None
    played, jobs = Played(target, drafter, Flat(target, rounds)), []
    with Forwards() as forwards:
        for prompt, of in crowd.requests:
            jobs.append(played.submit(prompt, policy=useless() if policy else None, **of))
            for _ in range(6):
                played.seats.step()
        played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    # A forward of many is counted for each of them; newcomers, looks and ends begin anew.
    ahead = target.start().can_pipeline
    assert forwards.ahead > ((0.3 if policy else 0.9) * sum(SIZES) - 6 if ahead else -1)


def test_many_that_rest_look_together_now_and_then():
    target, size = tiny_target(), 60
    prompts = [[token % 192 for token in random_prompt(12, at)] for at in range(2)]
    crowd = Crowd(target, [(prompt, {"max_tokens": size}) for prompt in prompts])
    rounds = SharedRounds(shared_costs(1.0, 1.0, 16.0))
    played = Played(target, crowd.knowing(0.0), Flat(target, rounds))
    jobs = [played.submit(prompt, policy=useless(), **of) for prompt, of in crowd.requests]
    booked = []
    observe = rounds.observe

    def observed(brought):
        booked.append(len(brought))
        observe(brought)

    with Forwards() as forwards, patch.object(rounds, "observe", observed):
        played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    assert booked == [2] * (size - 1), "rounds that were begun ahead are booked, too"
    assert forwards.ahead > 60 and max(map(len, forwards.looks.split("L"))) == 2 * LONGEST


def test_one_that_rests_can_pipeline_in_an_engine_for_many():
    crowd = Crowd(tiny_target(), [(PROMPT, {"max_tokens": 60})])
    rounds = SharedRounds(shared_costs(1.0, 1.0, 16.0))
    played = Played(crowd.target, crowd.knowing(0.0), Flat(crowd.target, rounds))
    job = played.submit(PROMPT, policy=useless(), max_tokens=60)
    with Forwards() as forwards:
        played.run()
    assert job.result().tokens == crowd.alone[0] and forwards.ahead > 45
    assert max(map(len, forwards.looks.split("L"))) == LONGEST - 1


def test_who_leaves_while_the_next_round_is_begun_disturbs_nobody():
    target = tiny_target()
    prompts = [[token % 192 for token in random_prompt(10 + at, at)] for at in range(3)]
    crowd = Crowd(target, [(prompt, {"max_tokens": 30}) for prompt in prompts])
    played = Played(target, None, Flat(target, None), memory=None)
    jobs = [played.submit(prompt, **of) for prompt, of in crowd.requests]
    for _ in range(8):
        played.seats.step()
    jobs[0].cancel()
    played.seats.step()
    played.seats.give_way()  # the youngest reads its text again, later on
    played.run()
    assert jobs[0].result().finish_reason == "cancelled"
    assert [job.result().tokens for job in jobs[1:]] == crowd.alone[1:]
    assert jobs[0].result().tokens == crowd.alone[0][: len(jobs[0].result().tokens)]


class OfMyOwn:
    """A drafter that reads no features, and is told of each row by `extend`; the second breaks."""

    tap_layers, breaks = (), ()

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


def test_a_round_that_is_begun_is_read_and_closed_in_any_thread():
    target, tokens = tiny_target(), []
    events = dm.stream_generate(target, OfMyOwn(), PROMPT, max_tokens=ANSWER, block_size=1)
    for _ in range(12):
        tokens += in_a_thread(lambda: next(events)).tokens
    in_a_thread(events.close)
    assert tokens == greedy(target, PROMPT, 12)


def test_who_breaks_when_his_row_is_taken_breaks_alone():
    """Before anything of the next round was computed: the others go on with it."""
    target, drafter = tiny_target(), OfMyOwn()
    prompts = [PROMPT, [*PROMPT, *PROMPT, *PROMPT], [*PROMPT, 8]]
    drafter.breaks = (len(prompts[1]) + 1,)
    crowd = Crowd(target, [(prompt, {"max_tokens": 9}) for prompt in prompts])
    played = Played(target, drafter, Flat(target, None))
    jobs = [played.submit(prompt, block_size=1, **of) for prompt, of in crowd.requests]
    read, prefill = [], TargetSession.read

    def counted(session, tokens, last):
        read.extend(tokens)
        return prefill(session, tokens, last)

    with patch.object(TargetSession, "read", counted):
        played.run()
    with pytest.raises(ValueError, match="mine"):
        jobs[1].result()
    assert [jobs[at].result().tokens for at in (0, 2)] == [crowd.alone[0], crowd.alone[2]]
    assert len(read) == sum(map(len, prompts)), "nobody has to read again"


def test_what_tells_of_more_than_itself_begins_nothing_and_has_nothing_to_beat():
    """Under a penalty no round is begun ahead, so that drafting has only rounds alone to beat."""
    host = Costs({64: {1: 1.0, 2: 1.0}}, {64: {1: 0.0, 2: 0.0}}, ahead=0.5)
    target = tiny_target()
    answer = greedy(target, PROMPT, 40)
    with patch.object(Watch, "saw"):  # the costs are made up, and stay so
        widths = [
            dm.generate(
                target,
                Oracle(PROMPT, answer, target.vocab_size, 1.0),
                PROMPT,
                max_tokens=40,
                policy=Policy(host, 2),
                **settings,
            ).stats.widths
            for settings in ({}, {"logit_bias": {3: 0.0}})
        ]
    assert widths[0].get(2, 0) < 5 and widths[1][2] > 10  # but for tries
