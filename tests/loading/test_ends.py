"""EOS tokens: every file that may name them, in every combination."""

import json
from itertools import compress, product
from pathlib import Path
from typing import Any

import pytest
from ggufs import gguf_of, vocabulary, write
from mlx_lm import load as mlx_lm_load
from mlx_lm.utils import load_tokenizer
from tinymodels import END, greedy, model_config, refusal, save_target, tokenizer
from transformers import GenerationConfig

from dflash_mlx import Engine, generate
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.gguf.gguf_tokenizer import CONTROL, USER_DEFINED, end_tokens
from dflash_mlx.loading.load import load_target
from dflash_mlx.loading.tokenizer_loader import read_tokenizer
from dflash_mlx.structured import GrammarTokens, JsonSchema
from dflash_mlx.train.answer_writer import AnswerSettings, complete_prompts

ABSENT = object()
CONFIG = (ABSENT, None, 5, [5, 6], [])
NESTED = (ABSENT, None, 11, [11, 12])
GENERATION = (ABSENT, None, 7, [7, 9], [9], [])
TOKENIZER = (ABSENT, END)


def with_ids(content: dict[str, Any], ids: Any) -> dict[str, Any]:
    return content | ({} if ids is ABSENT else {"eos_token_id": ids})


def names_some(ids: Any) -> bool:
    """Whether a field names at least one token."""
    return ids is not ABSENT and ids not in (None, [])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("ends") / "model", "llama")


@pytest.mark.parametrize("tokenizer_end", TOKENIZER, ids=["no end of the tokenizer's", "tokenizer"])
@pytest.mark.parametrize("generation", GENERATION)
def test_every_combination_of_files_ends_a_text_as_in_mlx_lm(
    saved: Path, tmp_path: Path, generation: Any, tokenizer_end: Any
) -> None:
    """Or as in transformers, if only `text_config` names EOS tokens: mlx-lm does not read it."""
    for file in saved.iterdir():
        if "config" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    settings["eos_token"] = None if tokenizer_end is ABSENT else tokenizer_end
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not ABSENT:
        content = json.dumps(with_ids({"do_sample": False}, generation))
        (tmp_path / "generation_config.json").write_text(content)
    plain = json.loads((saved / "config.json").read_text())
    own_ids = set() if tokenizer_end is ABSENT else {tokenizer().convert_tokens_to_ids(END)}
    for outer, nested in product(CONFIG, NESTED):
        config = with_ids(plain, outer)
        if nested is not ABSENT:
            config["text_config"] = with_ids({"model_type": "llama"}, nested)
        (tmp_path / "config.json").write_text(json.dumps(config))
        if names_some(generation) or names_some(outer) or not names_some(nested):
            expected = mlx_lm_load(str(tmp_path), lazy=True)[1].eos_token_ids
        else:
            if outer == []:
                config = {name: value for name, value in config.items() if name != "eos_token_id"}
            ids = GenerationConfig.from_model_config(config).eos_token_id
            expected = own_ids | set(ids if isinstance(ids, list) else [ids])
        assert read_tokenizer(Folder(tmp_path)).eos_token_ids == expected, (outer, nested)


def test_eos_tokens_that_mlx_lm_defines_for_a_family_are_kept(tmp_path: Path) -> None:
    """Checkpoints of Muse Spark name none; mlx-lm's module for them does."""
    save_target(tmp_path, "llama")
    config = {"model_type": "muse_spark", "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = load_tokenizer(tmp_path).eos_token_ids
    assert len(expected) > 1
    assert read_tokenizer(Folder(tmp_path)).eos_token_ids == expected


def test_token_0_of_a_generation_config_is_an_eos_token(tmp_path: Path) -> None:
    """mlx-lm ignores 0, but it is <|endoftext|> in GPT-NeoX's vocabulary."""
    save_target(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert Folder(tmp_path).end_tokens == [0]


@pytest.mark.parametrize("ids", ["<|end|>", 2.5, True, [2, None], {"a": 1}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_eos_ids_that_are_not_integers_are_refused(tmp_path: Path, ids: Any, file: str) -> None:
    save_target(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(with_ids(content, ids)))
    assert f"{file}: eos_token_id must be" in refusal(ConfigError, load_target, tmp_path)


def test_eos_tokens_of_generation_config_end_all_texts(tmp_path: Path) -> None:
    """Those of `generate`, the engine, the trainer and grammars."""
    folder = save_target(tmp_path, "llama")
    prompt = tokenizer().encode("user: what is 37")
    whole = greedy(load_target(str(folder)), prompt, 12)
    end = whole[5]
    text = whole[: whole.index(end) + 1]
    end_id = tokenizer().convert_tokens_to_ids(END)
    config = model_config("llama", eos_token_id=end_id)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end_id, end]}))
    target = load_target(str(folder))
    answer = generate(target, None, prompt, max_tokens=12)
    assert answer.tokens == text and answer.finish_reason == "stop"
    with Engine(target, None) as engine:
        assert engine.submit(prompt, max_tokens=12).result().tokens == text
    (trained,) = complete_prompts(target, [prompt], AnswerSettings(max_tokens=12))
    assert list(trained.answer) == text and trained.ended
    assert GrammarTokens(target).eos_ids == {end_id, end}


def test_eos_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "llama")
    end = tokenizer().convert_tokens_to_ids(END)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 10**6]}))
    target = load_target(str(folder))
    assert GrammarTokens(target).eos_ids == {end}
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    rule = JsonSchema(target, schema)
    prompt = tokenizer().encode("user: ")
    answer = generate(target, None, prompt, logits_processors=[rule], max_tokens=4)
    assert answer.finish_reason == "stop" and 1 <= int(answer.text) <= 9


# GGUF files name EOS tokens with keys, and some control tokens are EOS tokens by their text.

KEYS = ("eos", "eot", "eom")
TEXTS = ("<|end|>", "<|return|>", "<|endoftext|>", "[EOT]")


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_every_combination_of_keys_and_control_tokens_of_gguf_files(kind: int) -> None:
    plain = vocabulary()
    first = len(plain["tokenizer.ggml.tokens"])
    plain["tokenizer.ggml.tokens"] = [*plain["tokenizer.ggml.tokens"][:-1], "last"]
    eos = plain.pop("tokenizer.ggml.eos_token_id")
    plain["tokenizer.ggml.tokens"][eos] = "no end"
    for chosen in product((False, True), repeat=len(KEYS) + len(TEXTS)):
        keys = list(compress(KEYS, chosen))
        texts = list(compress(TEXTS, chosen[len(KEYS) :]))
        content = plain | {f"tokenizer.ggml.{key}_token_id": KEYS.index(key) + 3 for key in keys}
        content["tokenizer.ggml.tokens"] = plain["tokenizer.ggml.tokens"] + texts
        types = plain["tokenizer.ggml.token_type"] + [kind] * len(texts)
        content["tokenizer.ggml.token_type"] = types
        expected = {KEYS.index(key) + 3 for key in keys}
        is_gpt_oss = "<|return|>" in texts
        for text in texts:
            # In gpt-oss, <|end|> ends a message, but another message of the answer follows.
            if not (is_gpt_oss and text == "<|end|>"):
                expected.add(first + texts.index(text))
        if expected:
            assert set(end_tokens("a", content)) == expected, (keys, texts)
        else:
            assert "no text would end" in refusal(ConfigError, end_tokens, "a", content)


def test_the_eos_tokens_of_a_gguf_file_are_those_of_its_target(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("qwen3")
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    write(tmp_path / "a.gguf", metadata=metadata | more, tensors=tensors, kinds={})
    target = load_target(str(tmp_path / "a.gguf"))
    assert target.tokenizer.eos_token_ids == {5, 6, metadata["tokenizer.ggml.eos_token_id"]}
