"""Model folders, and ten thousand ways to damage them, each the same for the same seed."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damaged_text import TEMPLATES, damage_bytes, damage_text
from families import CONFIGS, random_model
from tinymodels import CHAT_TEMPLATE, save_weights, tokenizer

# A plain one, a nested config with states, yarn with windows and sinks, one with two head sizes
# and a tied head, and MLA.
FAMILIES = ("llama", "qwen3_5", "gpt_oss", "gemma4_dense", "deepseek_v3")
MESSAGES = [{"role": "user", "content": "what is 37?"}]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What stands in place of a value: of other types, at the borders, far beyond them.
_VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 5, 7, 100, 2**31, 2**31 - 1, 2**62]
_VALUES += [10**30, 10**400, -(10**30), 0.0, -0.5, 0.5, 4.0, 1e-300, 1e308, "", "4", "x" * 999]
_VALUES += [[], [1], [[]], ["x"], [None], [0] * 300, {}, {"a": 1}, {"": None}, "\n", "../x", "\0"]
_VALUES += [float("nan"), float("inf"), float("-inf"), {"__float__": "NaN"}, "qwen3", "llama"]
_DTYPES = ["F64", "F16", "BF16", "I8", "I32", "U32", "I64", "BOOL", "U8", "C64", "F99", "", "f32"]
# Fields that are not in the small configs, and that mlx-lm, transformers or this package read.
_CONFIG_FIELDS = ["eos_token_id", "quantization", "quantization_config", "text_config"]
_CONFIG_FIELDS += ["architectures", "model_file", "auto_map", "tie_word_embeddings", "rope_theta"]
_CONFIG_FIELDS += [
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "bos_token_id",
]
_CONFIG_FIELDS += ["max_position_embeddings", "attention_bias", "quantize_activations", "head_dim"]
_TOKENIZER_FIELDS = ["tokenizer_class", "tool_parser_type", "chat_template_type", "auto_map"]
_TOKENIZER_FIELDS += ["eos_token", "bos_token", "unk_token", "added_tokens_decoder", "backend"]
_TOKENIZER_FIELDS += ["model_max_length", "extra_special_tokens", "additional_special_tokens"]
_TOKENIZER_FIELDS += ["padding_side", "model_input_names", "add_prefix_space", "chat_template"]
_SIDE_FILES = ["generation_config.json", "special_tokens_map.json", "added_tokens.json"]
_SIDE_FILES += ["chat_template.json", "hf_quant_config.json", "vocab.json", "merges.txt"]


def save_family(folder: Path, family: str) -> Path:
    """A whole folder of a random model: config, weights, tokenizer, template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    save_weights(folder, random_model(family))
    tokenizer().save_pretrained(folder)
    return folder


def damage(folder: Path, family: str, seed: int) -> str:
    """Damage a whole folder in the way of this seed; says what was done."""
    rng = random.Random(f"{family} {seed}")
    kinds = [_config] * 8 + [_weights] * 4 + [_tokenizer] * 4 + [_template] * 3 + [_file]
    return kinds[seed % len(kinds)](folder, rng)


def _config(folder: Path, rng: random.Random) -> str:
    return _damage_json(folder / "config.json", rng, _CONFIG_FIELDS)


def _tokenizer(folder: Path, rng: random.Random) -> str:
    name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "side"])
    if name == "side":
        path = folder / rng.choice(_SIDE_FILES)
        fields = {name: rng.choice(_VALUES) for name in rng.sample(_TOKENIZER_FIELDS, 2)}
        fields["eos_token_id"] = rng.choice(_VALUES)
        path.write_text(json.dumps(rng.choice([fields, fields, *_VALUES])))
        return f"{path.name} = {path.read_text()[:200]}"
    fields = _TOKENIZER_FIELDS if name == "tokenizer_config.json" else ["model", "decoder"]
    return _damage_json(folder / name, rng, fields)


def _template(folder: Path, rng: random.Random) -> str:
    template: Any = rng.choice(TEMPLATES)
    if rng.random() < 0.4:
        template = damage_text(CHAT_TEMPLATE, rng)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if rng.random() < 0.5 and isinstance(template, str):
        (folder / "chat_template.jinja").write_bytes(template.encode(errors="surrogatepass"))
    else:
        path = folder / "tokenizer_config.json"
        content = json.loads(path.read_text()) | {"chat_template": template}
        path.write_text(json.dumps(content))
    return f"chat template = {str(template)[:200]!r}"


def _file(folder: Path, rng: random.Random) -> str:
    """Something that is no file in place of one."""
    names = ["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", INDEX, *_SIDE_FILES]
    path = folder / rng.choice(names)
    path.unlink(missing_ok=True)
    kind = rng.choice(["pipe", "folder", "dangling", "loop", "missing", "empty", "device", "huge"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nothing")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.touch()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**40)
    return f"{path.name} is {kind}"


def _weights(folder: Path, rng: random.Random) -> str:
    path = folder / WEIGHTS
    kind = rng.choice(["header", "header", "header", "header", "dtype", "value", "bytes", "index"])
    if kind == "index":
        names = {"model.norm.weight": rng.choice([WEIGHTS, "nothing", "\0", "x" * 999, 5])}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        return f"{INDEX}: {_damage_json(folder / INDEX, rng, ['weight_map'])}"
    content = path.read_bytes()
    if kind == "bytes":
        path.write_bytes(damage_bytes(content, rng))
        return f"bytes of {WEIGHTS}"
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    done = _damage_values(header, rng)
    if kind == "dtype":
        name = rng.choice([name for name in header if name != "__metadata__"])
        if isinstance(header[name], dict):
            header[name]["dtype"] = rng.choice(_DTYPES)
        done = f"{name} is of another type"
    elif kind == "value":
        header = json.loads(content[8 : 8 + length])
        at = rng.randrange(len(data) // 4) * 4
        number = rng.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"])
        data, done = data[:at] + number + data[at + 4 :], f"NaN or infinity at {at}"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return f"{WEIGHTS}: {done}"


def _damage_json(path: Path, rng: random.Random, fields: list[str]) -> str:
    """Damage a JSON file: mostly its values, sometimes its text."""
    if rng.random() < 0.1:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
        return f"bytes of {path.name}"
    content = json.loads(path.read_text())
    if rng.random() < 0.25:
        field, value = rng.choice(fields), copy.deepcopy(rng.choice(_VALUES))
        content[field], done = value, f"{field} = {value!r:.200}"
    else:
        done = _damage_values(content, rng)
    if rng.random() < 0.05:
        content, done = rng.choice(_VALUES), "another root"
    path.write_text(json.dumps(content))
    return f"{path.name}: {done}"


def _damage_values(content: Any, rng: random.Random) -> str:
    """Replace, remove or change one value, wherever it is nested; says which."""
    places = _places(content)
    holder, key, name = rng.choice(places)
    old = holder[key]
    changes: list[Callable[[], Any]] = [lambda: copy.deepcopy(rng.choice(_VALUES))] * 4
    if isinstance(old, int | float):
        changes += [lambda: old * 2, lambda: old + 1, lambda: old - 1, lambda: -old]
        changes += [lambda: float(old), lambda: str(old), lambda: old // 2]
    if rng.random() < 0.1:
        del holder[key]
        return f"no {name}"
    holder[key] = rng.choice(changes)()
    return f"{name} = {holder[key]!r:.200}"


def _places(content: Any, name: str = "") -> list[tuple[Any, Any, str]]:
    """Every value in parsed JSON: what holds it, its key, and its name; of long lists a few."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in list(items)[:60]:
        found.append((content, key, f"{name}.{key}"))
        if isinstance(value, dict | list):
            found += _places(value, f"{name}.{key}")
    return found


def copy_folder(whole: Path, folder: Path) -> None:
    """A fresh copy of a whole folder, whatever was there before."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
