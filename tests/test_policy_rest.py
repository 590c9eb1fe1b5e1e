"""Where looks find nothing worth drafting there are fewer of them, and the way back is found."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_engine_rows import shared_costs
from test_policy import WIDEST, costs
from tinymodels import target

from dflash_mlx.engine.rows import SharedRounds
from dflash_mlx.engine.together import Flat
from dflash_mlx.loop import BatchItem
from dflash_mlx.policy.cuts import Cuts
from dflash_mlx.policy.offer import Offer
from dflash_mlx.policy.outcome import Outcome
from dflash_mlx.policy.rest import LONGEST, PATIENCE, WELL, Rest
from dflash_mlx.policy.rounds import ChainRounds, TreeRounds
from dflash_mlx.policy.trees import TreePolicy
from dflash_mlx.policy.widths import Policy, Widths
from dflash_mlx.proposal import Proposal

SURE, UNSURE = 0.9999, 0.3
PAIR = costs(1.8, 0.4)
AHEAD = 0.8  # what a plain round takes that is begun ahead, over one on its own


def test_looks_in_vain_make_rest_longer_up_to_a_bound_and_a_draft_ends_it():
    rest, looks = Rest(), ""
    for _ in range(120):
        looks += "." if rest.begin() else "L"
        if not rest.now:
            rest.looked(False, 1.0)
    rests = [2**n - 1 for n in range(LONGEST.bit_length() + 1)]
    longer = "".join(PATIENCE * ("L" + "." * rounds) for rounds in rests)
    assert looks.startswith(longer[1:]), "the first look is the first in vain"
    assert looks.endswith(4 * ("L" + "." * LONGEST), 0, looks.rindex("L"))
    while rest.begin():
        pass
    rest.looked(True, 1.0)
    assert not any(rest.begin() for _ in range(4))


class Text:
    """A request whose drafts are right where its target is sure, and wrong where it is not."""

    def __init__(self, policy):
        cuts = Cuts(policy.confidence(0.0))
        self.rounds = ChainRounds(policy.start(), policy.sharpness(0.0), cuts, False)
        self.rounds.begin(UNSURE)
        self.sure, self.anchor, self.looks, self.looked = False, 0, 0, ""
        self.target = self.drafter = self

    @property
    def doubt(self):
        return self.rounds.doubt

    position, can_pipeline, unread, reading, slower = 64, True, 0, 0.0, 1.0

    def propose(self, anchor, width):
        """As the session."""
        self.asked = width
        return Proposal([anchor] * width)

    def offer(self, rest):
        """As the request."""
        return self.rounds.offer(self, self.anchor, 64, WIDEST, rest)

    def absorb(self, proposal, shared, looks=None, ahead=0):
        """The tokens of a round; counts it if it looked at how sure the target was."""
        right = (len(proposal) - 1) * self.sure
        looks = self.rounds.asks_certainty if looks is None else looks
        certainty = (SURE if self.sure else UNSURE) if looks else None
        took, text = PAIR.rounds(64, WIDEST)[len(proposal) - 1], [0] * (right + 1)
        took = self.slower * (took + self.reading * (len(proposal) > 1))
        took *= {0: 1, 1: 1.7, 2: AHEAD}[ahead]
        self.rounds.observe(Outcome(proposal, right, text, certainty, took, shared, ahead))
        self.looks += looks
        self.looked += "L" if looks else "."
        return text


def alone(texts):
    [text] = texts

    def play():
        proposal = text.rounds.propose(text, text.anchor, 64, WIDEST)
        text.absorb(proposal, shared=False)
        return len(proposal)

    return play


def ahead(texts):
    """Alone, and plain rounds are begun before the last one is read, as a `Request` has them."""
    [text], begun, looks = texts, False, False
    text.waits = 0  # rounds that were not

    def play():
        nonlocal begun, looks
        rounds, asks = text.rounds, looks
        if begun:
            rounds.go_on(text, text.anchor, 64, WIDEST, shared=False)
            proposal = Proposal([text.anchor])
        else:
            proposal = rounds.propose(text, text.anchor, 64, WIDEST)
            asks = rounds.asks_certainty
            text.waits += 1
        before, begun, looks = begun, rounds.plain_next, rounds.looks_next
        assert len(proposal) == 1 or not begun, "behind a draft nothing is begun"
        text.absorb(proposal, shared=False, looks=asks, ahead=before + begun)
        return len(proposal)

    return play


def together(texts):
    flat = Flat(target(), SharedRounds(shared_costs(0.12, 0.1, 0.3), lambda: 0.0))

    def play():
        turns = [BatchItem(text) for text in texts]
        flat.propose(turns)
        for turn in turns:
            turn.event = SimpleNamespace(tokens=turn.request.absorb(turn.proposal, shared=True))
        flat.observe(turns)
        return max(len(turn.proposal) for turn in turns)

    return play


@pytest.mark.parametrize("count, playing", [(1, alone), (1, ahead), (4, together)])
def test_a_text_that_nothing_is_drafted_for_is_looked_at_seldom_until_that_changes(count, playing):
    policy = Policy(PAIR, WIDEST)
    texts = [Text(policy) for _ in range(count)]
    play, looks = playing(texts), []
    for _ in range(120):
        play()
        looks.append(sum(text.looks for text in texts) / count)
    assert looks[PATIENCE - 1] == PATIENCE and 4 <= looks[-1] - looks[-41] <= 16, looks
    for text in texts:
        text.sure = True
    widths = [play() for _ in range(20)]
    assert max(widths[:16]) > 1 and min(widths[-4:]) > 1, widths


def test_looks_of_a_rest_wait_for_nobody_and_its_end_costs_one_token():
    """They say whether a draft would pay, and only if it does the device waits for the host."""
    policy = Policy(PAIR, WIDEST)
    text = Text(policy)
    play = ahead([text])
    for _ in range(90):
        play()
    waits = text.waits
    for _ in range(60):
        assert play() == 1
    assert text.waits == waits <= PATIENCE + 10, "the first looks, and tries of drafts"
    assert "LL".join(["." * (LONGEST - 1)] * 4) in text.looked, "each time two in a row"
    assert text.looked.startswith("LLLLLLLLLLLL..LL......LL")
    text.sure, rounds = True, 0
    while play() == 1:
        rounds += 1
    assert rounds <= 2 * LONGEST and text.waits == waits + 1


def test_a_draft_of_which_nothing_is_verified_was_no_reason_to_stop_resting(monkeypatch):
    """A head that says how sure a drafter is may cut all of what a look has hoped for."""
    text = Text(Policy(PAIR, WIDEST))
    monkeypatch.setattr(text.rounds, "_cut", lambda proposal, session: proposal.first(1))
    monkeypatch.setattr(Widths, "width", lambda *of: 4)
    drafts, play = [], ahead([text])
    for _ in range(120):
        text.asked = 0
        play()
        drafts.append(text.asked > 1)
    assert 4 <= sum(drafts[-48:]) <= 48 // LONGEST + 1


@pytest.mark.parametrize("fresh", [False, True])
def test_rounds_of_rest_say_how_busy_the_machine_is(fresh):
    """Of those that are begun ahead the ones that look are timed; of others there are none left."""
    policy = Policy(replace(PAIR, ahead=AHEAD), WIDEST)
    text = Text(policy)
    play = alone([text]) if fresh else ahead([text])
    for _ in range(100):
        play()
    assert policy.watch.pace == pytest.approx(1)
    text.slower = 2.0
    for _ in range(200):
        play()
    assert policy.watch.pace == pytest.approx(2)
    assert policy.plain_seconds(64) == pytest.approx(2 * AHEAD)


def test_to_ask_whether_a_tree_pays_is_not_to_draft_one():
    policy = TreePolicy(Policy(PAIR, WIDEST), PAIR)
    policy.scored = 100
    sizes = policy.start()
    paused = vars(sizes)["_paused"]
    assert sizes.pays(64, WIDEST, 0.9999) and vars(sizes)["_paused"] == paused > 0


def test_rounds_of_many_are_not_asked_how_sure_the_target_is_when_they_are_begun_ahead():
    text = Text(Policy(PAIR, WIDEST))
    play = ahead([text])
    while not text.rounds.looks_next:
        play()
    text.offer(rest=True)
    assert not text.rounds.looks_next
    while not (text.rounds.looks_next and text.rounds.plain_next):
        play()
    text.rounds.go_on(text, text.anchor, 64, WIDEST, shared=True)
    assert text.rounds.plain_next and not text.rounds.looks_next


def test_many_that_begin_a_rest_in_its_last_round_look_again():
    rounds = SharedRounds(shared_costs(1.0, 1.0, 16.0))
    for _ in range(2 * PATIENCE):
        rounds.rest.begin()
        rounds.rest.looked(False, 1.0)
    while rounds.rest.lasts:
        rounds.rest.begin()
    rounds.go_on(2)  # as others do that come to be together
    assert not rounds.rest.lasts and not rounds.rest.begin()


class Finds:
    """A session beside whose network a lookup finds a draft, or does not."""

    only_foresees, found, network = False, (), None

    def drafted(self, anchor, proposal):
        raise AssertionError("nobody drafts")

    def foresee(self, anchor, width):
        return list(self.found)

    def propose_lookup(self, anchor, width):
        return Proposal([anchor] * width)


@pytest.mark.parametrize("trees", [False, True])
def test_who_comes_to_many_at_rest_may_find_a_draft_before_it_ever_looked(trees):
    """It was an error, for no costs had been looked up: the server's answer ended in it."""
    session, policy = Finds(), Policy(PAIR, WIDEST)
    if trees:
        rounds = TreeRounds(TreePolicy(policy, PAIR), 0.0)
    else:
        cuts = Cuts(policy.confidence(0.0))
        rounds = ChainRounds(policy.start(), policy.sharpness(0.0), cuts, False)
    rounds.offer(session, 0, 64, WIDEST, rest=True)
    rounds.go_on(session, 0, 64, WIDEST, shared=True)
    assert rounds.plain_next
    session.found = [0.9] * 7
    rounds.go_on(session, 0, 65, WIDEST, shared=True)
    assert not rounds.plain_next


def test_drafts_that_are_right_say_how_sure_the_target_is_until_one_is_wrong():
    text = Text(Policy(PAIR, WIDEST))
    text.rounds.begin(SURE)
    text.sure, play = True, alone([text])
    widths = [play() for _ in range(20)]
    looked = text.looks
    assert min(widths[1:]) > WELL and looked <= 2
    text.sure = False
    play(), play()
    assert text.looks == looked + 1


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_a_draft_reads_first_says_nothing_of_its_width(slower):
    """Many tokens' features wait, and are read once: such a round is no dearer width's."""
    policy, seen = Policy(replace(PAIR, unread=0.005), WIDEST), []
    text, saw = Text(policy), policy.watch.saw

    def seeing(rows, seconds, measured):
        seen.append((rows > 1, seconds / measured))
        saw(rows, seconds, measured)

    policy.watch.saw, text.unread, text.reading, text.slower = seeing, 101, 0.5, slower
    play = alone([text])
    for at in range(60):
        text.sure = at % 30 < 15
        play()
    drafted = [is_draft for is_draft, _ in seen]
    assert drafted.count(True) > 10 and drafted.count(False) > 10
    assert [multiple for _, multiple in seen] == pytest.approx([slower] * len(seen))


class Drafted(Text):
    """A request that has drafted what is hardly ever right, and is told how much is verified."""

    def offer(self, rest):
        self.told = []
        return Offer([0.01], lambda rows: self.told.append(rows) or Proposal([0] * rows))


def test_what_is_drafted_hears_that_none_of_it_is_verified():
    """A tree learns from the text that goes on past it, whether it was verified or not."""
    texts = [Drafted(Policy(PAIR, WIDEST)) for _ in range(2)]
    assert together(texts)() == 1 and [text.told for text in texts] == [[1], [1]]
