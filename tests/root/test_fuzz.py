"""Files of models and of the prefix cache, damaged at random: right text, a miss, or one line."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import random_model, target_of
from test_prefix_disk import rewritten
from tinymodels import random_drafter, save_target
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.prompt import encode_prompt

SECONDS, GIB = 20, 2**30
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts
BEFORE = UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
PROMPT = [random.Random(1).randrange(150) for _ in range(60)]


def pick_chunks(case: random.Random) -> None:
    """A chunk of a prefix folder with other contents under a fitting checksum."""
    kind = case.choice(["llama", "gpt_oss", "qwen3_5"])
    target = target_of(random_model(kind), kind) if kind != "llama" else tiny_target()
    drafter = random_drafter() if kind == "llama" else None
    plain = dm.generate(target, None, PROMPT, max_tokens=4).tokens
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"memory": GIB, "folder": folder, "chunk": 16, "disk_left": 0}
        for damage in (False, True):
            if damage:
                files = sorted(Path(folder, "prefix").iterdir())
                for file in case.sample(files, case.randrange(1, 3)):
                    _damage(case, file, case.choice(files))
            store = dm.PrefixStore(target, drafter, **settings)
            result = dm.generate(target, drafter, PROMPT, max_tokens=4, prefix=store)
            store.flush()
            assert result.tokens == plain


def _replace(file: Path, link: str | Path | None = None) -> None:
    """Put a link in a file's place; without one, a pipe that nobody writes to."""
    file.unlink()
    if link is None:
        os.mkfifo(file)
    else:
        file.symlink_to(link)


def _damage(case: random.Random, file: Path, other: Path) -> None:
    way = case.randrange(9)
    if way == 0:
        _replace(file)
    elif way == 1:
        _replace(file, case.choice(["/dev/zero", "/dev/null", "/", "nowhere", other]))
    elif way == 2:
        os.truncate(file, case.choice([0, 9, 2**40]))
    elif way == 3:
        data = bytearray(file.read_bytes())
        length = int.from_bytes(data[:8], "little")
        data[case.randrange(8 + length)] ^= 1 << case.randrange(8)
        rewritten(file, bytes(data))
    elif way == 4 and other.is_file() and not other.is_symlink() and other != file:
        rewritten(file, other.read_bytes()[: 10**7])
    else:
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays, metadata = loaded
        name = case.choice(sorted(arrays) or [""])
        x = arrays.pop(name, mx.zeros((2, 3)))
        made = {
            5: {},
            6: {name: case.choice([x.T, x[..., :-1], mx.concatenate([x, x]), x[None], x[:0]])},
            7: {name: x.astype(case.choice([mx.float16, mx.int32, mx.float32, mx.bool_]))},
            8: {name: mx.full(x.shape, case.choice([mx.nan, mx.inf]))},
        }.get(way, {name: x, name + "x": x})
        if way == 7 and made[name].dtype == x.dtype:
            made = {}
        buffer = io.BytesIO()
        mx.save_safetensors(buffer, arrays | made, metadata)
        rewritten(file, buffer.getvalue())


PIECES = r"""
{{ 'x' * N }}
{{ 'x' | center(N) }}
{{ ['x'] * N }}
{{ ('x' * 999) | replace('x', 'y' * N) }}
{% for i in range(N) %}x{% endfor %}
{% for i in 'x' * 9999 %}{% for j in 'x' * N %}{% endfor %}{% endfor %}
{% macro f(x) %}{{ x }}{{ f(x) }}{% endmacro %}{{ f(1) }}
{{ lipsum(n=N) }}
{{ 9 ** N }}
{% set n = namespace(x='x') %}{% for i in range(N) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{{ '%*d' | format(N, 1) }}
{{ '{:>9999999999}'.format(1) }}
{{ ('x ' * 999) | wordwrap(N) }}
{{ messages | tojson(indent=N) }}
{{ messages[0].content * N }}
{{ messages[N].content }}
{{ ''.__class__.__mro__ }}
{{ messages.append(1) }}
{{ raise_exception('x' * N) }}
{{
{% if %}
{{ 'a\tb'.expandtabs(N) }}
{{ ['a'] | batch(N, 'x') | list }}
{{ 1 / 0 }}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}
hello
{% include 'x' %}
{{ range(N) | list }}
{{ namespace }}
""".split("\n")[1:-1]


def pick_templates(case: random.Random) -> None:
    """A chat template of pieces, some of which want all memory or never end."""
    target = tiny_target()
    chosen = case.choices(PIECES, k=case.randrange(1, 5))
    number = str(case.choice([0, 3, 1000, 99_999, 10**6, 3 * 10**9, 10**30]))
    text = "".join(chosen).replace("N", number)
    hf, before = target.tokenizer._tokenizer, target.tokenizer.chat_template
    hf.chat_template = text
    try:
        encode_prompt(target, [{"role": "user", "content": "what is 37 + 48?"}])
    finally:
        hf.chat_template = before


def pick_folders(case: random.Random) -> None:
    """A model folder with a damaged file."""
    with tempfile.TemporaryDirectory() as place:
        folder = save_target(Path(place, "model"))
        file = case.choice(sorted(folder.iterdir()))
        way = case.randrange(7)
        if way == 0:
            _replace(file)
        elif way == 1:
            _replace(file, case.choice(["/dev/zero", "/", "nowhere"]))
        elif way == 2:
            os.truncate(file, case.choice([0, 9, file.stat().st_size - 1, 2**40]))
        elif way == 3:
            shutil.copy(file, folder / f"model-{case.randrange(99)}.safetensors")
        elif way == 4 and file.suffix == ".json":
            file.write_text(json.dumps(_changed(case, json.loads(file.read_text()))))
        else:
            data = bytearray(file.read_bytes())
            for _ in range(case.randrange(1, 9)):
                data[case.randrange(min(len(data), 4000))] = case.randrange(256)
            file.write_bytes(data)
        target, _ = dm.load(str(folder), "none")
        dm.generate(target, None, [{"role": "user", "content": "what is"}], max_tokens=2)


def _changed(case: random.Random, value: Any) -> Any:
    """JSON with one value replaced."""
    if isinstance(value, dict | list) and value and case.random() < 0.9:
        places = list(value) if isinstance(value, dict) else range(len(value))
        at = case.choice(places)
        value[at] = _changed(case, value[at])
        return value
    return case.choice([None, -1, 0, 3, 2**40, 10**400, 1.5, "x", [], {}, True, [[1]], "../x"])


KINDS = {"chunks": pick_chunks, "templates": pick_templates, "folders": pick_folders}


def run(kind: str, number: int) -> str:
    """The line that an example ends with, "" if it ends well."""
    signal.alarm(2 * SECONDS)  # ends a process that hangs
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind](random.Random(number))
        line = ""
    except dm.DFlashError as error:
        line = str(error)
        assert line and "\n" not in line, line
    finally:
        signal.alarm(0)
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        assert resource.getrusage(who).ru_maxrss * UNIT < BEFORE + GIB, "too much memory"
    assert time.monotonic() - started < SECONDS
    return line


@pytest.mark.parametrize("number", range(100, 106))
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_right_text_a_miss_or_one_line(kind, number):
    """Each example ends within 20 seconds and 1 GB."""
    run(kind, number)
