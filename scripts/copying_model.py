"""Write a model that copies what it was shown: no training, every weight is made by hand.

    python scripts/copying_model.py OUT
    dflash-mlx bench --model OUT/model --draft lookup --prompts OUT/prompts.jsonl --max-tokens 1300

Real models copy when they rewrite a file; none that small enough to be trained here does. This one
is a Llama of two layers with an induction circuit. Eight heads of the first layer look back 1 to 8
tokens, by rotary positions alone, and note the token there. One head of the second looks for the
place whose eight tokens before it are the last eight now, and writes the token that stands there.
So it continues a text as it went on the last time, whatever the text is.

The prompt asks for a file of 60 lines again, with one name changed. The model understands nothing
of that: the changed line, the last one, is shown twice, so that two places outvote the one in the
file. What `bench` measures is the time of its forwards, with a lookup's drafts; it says nothing
of a real model's willingness to copy.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np

CODE, BACK, CONSTANT = 32, 8, 16  # width of a token's code, tokens looked back, constant columns
HEAD, HEADS, BASE = 512, 8, 1e10  # half of a head's pairs turn so slowly that they do not turn
HIDDEN = (BACK + 2) * CODE + CONSTANT
HALF, SLOW = HEAD // 2, HEAD // 4
LOOK_BACK, MATCH, LOUD = 300.0, 100.0, 10.0  # how sharp heads and logits are

WORDS = (
    "river stone copper window garden silver bridge morning yellow paper button winter orange "
    "forest kettle ladder marble needle pencil rocket saddle tunnel velvet walnut anchor basket "
    "candle desert engine feather guitar hammer island jacket lantern mirror napkin oyster pillow "
    "quarry ribbon shadow violin wagon zipper almond barrel cactus dragon"
).split()
LINES = 60


def _file() -> str:
    """60 lines of settings in which no two words follow each other twice."""
    rng, lines, last, seen = np.random.default_rng(3), list[str](), "", set[tuple[str, str]]()
    while len(lines) < LINES:
        words = [str(word) for word in rng.choice(WORDS, 5, replace=False)]
        pairs = set(zip([last, *words[:-1]], words, strict=True))
        if pairs & seen:
            continue
        seen |= pairs
        a, b, c, d, last = words
        lines.append(f"{a}_{b} = {c} {d} {last}\n")
    return "".join(lines)


FILE = _file()
OLD = FILE.splitlines()[-1].split(" ")[0] + " "
NEW = "renamed_setting "


def weights(vocabulary: int) -> dict[str, np.ndarray]:
    """Every tensor of the model by mlx-lm's names, in f32."""
    rng = np.random.default_rng(0)
    codes = rng.choice([-1.0, 1.0], (vocabulary, CODE))
    embedding = np.zeros((vocabulary, HIDDEN))
    embedding[:, :CODE], embedding[:, -CONSTANT:] = codes, 1.0
    head = np.zeros((vocabulary, HIDDEN))
    head[:, (BACK + 1) * CODE : (BACK + 2) * CODE] = LOUD * codes
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for layer, attention in enumerate((_looks_back(), _matches())):
        start = f"model.layers.{layer}"
        for name, tensor in attention.items():
            tensors[f"{start}.self_attn.{name}_proj.weight"] = tensor
        for name, shape in {"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)}.items():
            tensors[f"{start}.mlp.{name}_proj.weight"] = np.zeros(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = np.ones(HIDDEN)
    tensors["model.norm.weight"] = np.ones(HIDDEN)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _empty() -> dict[str, np.ndarray]:
    wide = {name: np.zeros((HEADS * HEAD, HIDDEN)) for name in "qkv"}
    return {**wide, "o": np.zeros((HIDDEN, HEADS * HEAD))}


def _looks_back() -> dict[str, np.ndarray]:
    """Head n attends n + 1 tokens back, and copies that token's code to its own columns."""
    parts, fast = _empty(), np.arange(SLOW)
    turns = BASE ** (-2 * fast / HEAD)  # radians a position
    for n in range(HEADS):
        at = n * HEAD
        parts["q"][at + fast, -1] = LOOK_BACK
        parts["k"][at + fast, -1] = np.cos(turns * (n + 1))
        parts["k"][at + HALF + fast, -1] = np.sin(turns * (n + 1))
        parts["v"][at + np.arange(CODE), np.arange(CODE)] = 1.0
        parts["o"][(n + 1) * CODE + np.arange(CODE), at + np.arange(CODE)] = 1.0
    return parts


def _matches() -> dict[str, np.ndarray]:
    """The first head finds the place before which the text was as it is now."""
    parts = _empty()
    slow = np.concatenate([np.arange(SLOW, HALF), HALF + np.arange(SLOW, HALF)])
    parts["q"][slow, np.arange(BACK * CODE)] = MATCH  # the token now and those before it,
    parts["k"][slow, CODE + np.arange(BACK * CODE)] = 1.0  # against those before a place
    parts["v"][np.arange(CODE), np.arange(CODE)] = 1.0
    parts["o"][(BACK + 1) * CODE + np.arange(CODE), np.arange(CODE)] = 1.0
    return parts


def prompt() -> str:
    """What is asked: the file, whose last line is shown changed, twice."""
    before, line = FILE.splitlines(keepends=True)[-2:]
    changed = before + line.replace(OLD, NEW)
    ends = "<|im_end|>\n<|im_start|>assistant\n"
    return f"Rename a setting:\n{changed}\n{changed}{ends}{FILE}"


def main() -> None:
    """Write the model's folder, with the embedded pair's tokenizer, and the prompt."""
    parser = argparse.ArgumentParser(description="Write a model that copies.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    import mlx.core as mx

    tiny = Path(str(files("dflash_mlx.tiny"))) / "target"
    for file in tiny.iterdir():
        if not file.name.startswith(("config.json", "model")):
            shutil.copy(file, folder / file.name)
    known = json.loads((tiny / "config.json").read_text())
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "rope_theta": BASE,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "vocab_size": known["vocab_size"],
        "eos_token_id": known["eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(tensor) for name, tensor in weights(known["vocab_size"]).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    line = {"category": "rewriting", "messages": [{"role": "user", "content": prompt()}]}
    (out / "prompts.jsonl").write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
