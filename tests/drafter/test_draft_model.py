"""A smaller language model as the drafter: what it drafts, and which it may be."""

import random

import families
import mlx.core as mx
import pytest
import tinymodels
from tinymodels import greedy

import dflash_mlx as dm
from dflash_mlx.drafter import draft_model
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter
from dflash_mlx.errors import IncompatibleDrafterError, SettingsError
from dflash_mlx.loading.load import load
from dflash_mlx.loop import generate
from dflash_mlx.sampling import Sampler
from dflash_mlx.settings import RequestSettings

# A row per token; windows of 32 rows; recurrent states.
CACHES = {"qwen3": {}, "sliding llama": {}, "qwen3_next": {"num_hidden_layers": 4}}
PROMPT = [5, 9, 2, 40, 41, 7, 100, 3]


def feed(session, tokens) -> None:
    session.extend(mx.zeros((1, len(tokens), 0)), tokens=tokens)


@pytest.mark.parametrize("family", CACHES)
def test_every_draft_is_the_models_own_text(family) -> None:
    """Over ragged steps, plain ones among them, whatever the target keeps."""
    model = tinymodels.target(family, **CACHES[family])
    draws = random.Random(0)
    session = DraftModel(model).start(tinymodels.target("llama"), Sampler())
    text = list(PROMPT)
    new = list(PROMPT)
    for width in (5, 2, 1, 1, 7, 4, 3, 6, 1, 5, 8):
        feed(session, new)
        anchor = draws.randrange(100)
        drafts = session.propose(anchor, width).tokens
        drafts = drafts if isinstance(drafts, list) else drafts.tolist()
        assert drafts == [anchor, *greedy(model, [*text, anchor], width - 1)]
        new = drafts[: draws.randint(1, width)]
        text += new
    assert session.position == len(text) - len(new)


def test_conversations_and_stored_prefixes_go_on_with_it() -> None:
    model = tinymodels.target("qwen3")
    drafter = DraftModel(model)
    session = drafter.start(model, Sampler())
    feed(session, PROMPT * 3)
    session.propose(9, 4)
    feed(session, [9, 4])
    session.trim_to(13)
    expected = [6, *greedy(model, [*PROMPT * 3][:13] + [6], 4)]
    assert session.propose(6, 5).tokens.tolist() == expected
    feed(session, [6])
    pieces = [session.rows(0, 8), session.rows(8, 14)]
    other = drafter.start(model, Sampler())
    other.restore(14, pieces, {}, 20)
    assert other.propose(1, 5).tokens.tolist() == session.propose(1, 5).tokens.tolist()


def test_itself_drafts_all_of_its_text_and_a_failing_processor_leaves_no_trace() -> None:
    target = tinymodels.target("qwen3")
    for drafter in (DraftModel(target), CombinedDrafter(DraftModel(target))):
        assert generate(target, drafter, PROMPT, max_tokens=33, block_size=8).stats.rounds == 4

    def fail(history, logits):
        raise ValueError("no")

    drafter = DraftModel(target)
    session = drafter.start(target, Sampler(RequestSettings(logits_processors=(fail,))))
    feed(session, PROMPT)
    with pytest.raises(ValueError, match="no"):
        session.propose(4, 3)
    session.resume(Sampler())
    assert session.propose(4, 3).tokens.tolist() == [4, *greedy(target, [*PROMPT, 4], 2)]


def test_another_vocabulary_is_refused_and_padding_is_not(tmp_path) -> None:
    target = tinymodels.target("qwen3")
    padded = tinymodels.target("llama", vocab_size=256)
    for pair in ((target, DraftModel(padded)), (padded, DraftModel(target))):
        text = generate(*pair, PROMPT, max_tokens=20, block_size=4)
        assert text.tokens == greedy(pair[0], PROMPT, 20)

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    padded = dm.Target(padded.model, Other(), padded.config, "other")
    with pytest.raises(
        IncompatibleDrafterError, match="same number.*smaller model of the same fam"
    ):
        DraftModel(padded).check_fits(target)


def test_vocabularies_are_compared_once(monkeypatch) -> None:
    """They may have hundreds of thousands of tokens, and every request begins a session."""
    asked = []
    read_vocabulary = draft_model._vocabulary
    monkeypatch.setattr(
        draft_model, "_vocabulary", lambda model: asked.append(model) or read_vocabulary(model)
    )
    target, other = (
        families.target_of(families.random_model("qwen3", seed), "qwen3") for seed in (0, 1)
    )
    drafter = DraftModel(other)
    for _ in range(3):
        drafter.start(target)
    assert len(asked) == 2


def test_a_folder_of_one_is_a_drafter(tmp_path, pair) -> None:
    folder = tinymodels.save_target(tmp_path / "small", "llama")
    target, drafter = load(pair[1], draft=f"{folder}+lookup", target_bits=None)
    assert drafter.label == "draft model+lookup"
    text = generate(target, drafter, "The quick", max_tokens=20)
    assert text.tokens == greedy(target, target.tokenizer.encode("The quick"), 20)
    with pytest.raises(SettingsError, match="draft_window"):
        load(pair[1], draft=str(folder), draft_window=8)
