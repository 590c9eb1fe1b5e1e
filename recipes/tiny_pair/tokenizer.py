"""A small byte-level BPE tokenizer with the ChatML template, in the standard Hugging Face files.

Digits and the spaces before them are tokens of their own: numbers of one length then always have
the same number of tokens, which both the arithmetic and the block drafter rely on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = [PAD, START, END, MASK]
# A digit, a word, other characters, or white space: what BPE does not merge across.
PIECES = r"\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries learnt from `texts`; deterministic in their order."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and its companions, as `transformers` and mlx-lm load them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    for name, content in (("tokenizer_config", settings), ("special_tokens_map", special)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
