"""A smaller language model as the drafter: its drafts, and the models that can be one."""

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

# Models with a row per token, with windows of 32 rows, and with recurrent states.
CACHES = {"qwen3": {}, "sliding llama": {}, "qwen3_next": {"num_hidden_layers": 4}}
PROMPT = [5, 9, 2, 40, 41, 7, 100, 3]


def feed(session, tokens) -> None:
    session.extend(mx.zeros((1, len(tokens), 0)), tokens=tokens)


@pytest.mark.parametrize("family", CACHES)
def test_every_draft_is_the_draft_models_greedy_text(family) -> None:
    """Over steps of different widths, of which the target keeps a random number of tokens."""
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


def test_drafts_are_right_after_a_trim_and_in_a_session_restored_from_its_rows() -> None:
    """A conversation trims its session; a prefix cache stores rows and restores them in another."""
    model = tinymodels.target("qwen3")
    drafter = DraftModel(model)
    session = drafter.start(model, Sampler())
    feed(session, PROMPT * 3)
    session.propose(9, 4)
    feed(session, [9, 4])
    session.trim_to(13)
    trimmed = (PROMPT * 3)[:13]
    expected = [6, *greedy(model, [*trimmed, 6], 4)]
    assert session.propose(6, 5).tokens.tolist() == expected
    feed(session, [6])
    pieces = [session.rows(0, 8), session.rows(8, 14)]
    restored = drafter.start(model, Sampler())
    restored.restore(14, pieces, {}, 20)
    assert restored.propose(1, 5).tokens.tolist() == session.propose(1, 5).tokens.tolist()


def test_all_drafts_of_the_target_itself_are_accepted() -> None:
    """The prefill gives one token, and four blocks of 8 the other 32."""
    target = tinymodels.target("qwen3")
    for drafter in (DraftModel(target), CombinedDrafter(DraftModel(target))):
        assert generate(target, drafter, PROMPT, max_tokens=33, block_size=8).stats.rounds == 4


def test_a_session_drafts_again_after_an_error_of_a_logits_processor() -> None:
    target = tinymodels.target("qwen3")

    def fail(history, logits):
        raise ValueError("no")

    drafter = DraftModel(target)
    session = drafter.start(target, Sampler(RequestSettings(logits_processors=(fail,))))
    feed(session, PROMPT)
    with pytest.raises(ValueError, match="no"):
        session.propose(4, 3)
    session.resume(Sampler())
    assert session.propose(4, 3).tokens.tolist() == [4, *greedy(target, [*PROMPT, 4], 2)]


def test_another_vocabulary_is_refused_and_another_padding_of_it_is_not(tmp_path) -> None:
    unpadded = tinymodels.target("qwen3")
    padded = tinymodels.target("llama", vocab_size=256)
    for target, model in ((unpadded, padded), (padded, unpadded)):
        text = generate(target, DraftModel(model), PROMPT, max_tokens=20, block_size=4)
        assert text.tokens == greedy(target, PROMPT, 20)

    class OtherTokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    other = dm.Target(padded.model, OtherTokenizer(), padded.config, "other")
    with pytest.raises(
        IncompatibleDrafterError, match="same number.*smaller model of the same family"
    ):
        DraftModel(other).check_fits(unpadded)


def test_vocabularies_are_compared_once(monkeypatch) -> None:
    """They may have hundreds of thousands of tokens, and every request starts a session."""
    models_read = []
    read_vocabulary = draft_model._vocabulary

    def recording_read(model):
        models_read.append(model)
        return read_vocabulary(model)

    monkeypatch.setattr(draft_model, "_vocabulary", recording_read)
    target = families.target_of(families.random_model("qwen3", seed=0), "qwen3")
    drafter = DraftModel(families.target_of(families.random_model("qwen3", seed=1), "qwen3"))
    for _ in range(3):
        drafter.start(target)
    assert len(models_read) == 2, "the target's and the drafter's"


def test_a_folder_of_a_language_model_loads_as_a_drafter(tmp_path, pair) -> None:
    folder = tinymodels.save_target(tmp_path / "small", "llama")
    target, drafter = load(pair[1], draft=f"{folder}+lookup", target_bits=None)
    assert drafter.label == "draft model+lookup"
    text = generate(target, drafter, "The quick", max_tokens=20)
    assert text.tokens == greedy(target, target.tokenizer.encode("The quick"), 20)
    with pytest.raises(SettingsError, match="draft_window"):
        load(pair[1], draft=str(folder), draft_window=8)
