"""Chat templates that raise, and text and bytes that were cut, doubled or changed."""

from __future__ import annotations

import random
from typing import Any

TEMPLATES: list[Any] = [
    "{{ 1 / 0 }}",
    "{{ messages[99] }}",
    "{{ messages[99].content }}",
    "{{ messages.nothing.at_all }}",
    "{{ nothing() }}",
    "{{ messages + 5 }}",
    "{{ messages[0].content + 5 }}",
    "{{ '%d' % 'x' }}",
    "{{ '{}{}'.format(1) }}",
    "{{ '{a.b}'.format(a=1) }}",
    "{{ messages | sort }}",
    "{{ messages | map('nothing') | list }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ messages | join(5) | int | round(400) }}",
    "{{ raise_exception('roles\nmust\nalternate') }}",
    "{{ raise_exception(5) }}",
    "{{ strftime_now(5) }}",
    "{{ strftime_now('%') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% include 'other' %}",
    "{% extends 'other' %}",
    "{% import 'other' as o %}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in 5 %}x{% endfor %}",
    "{% for a, b in messages %}{{ a }}{% endfor %}",
    "{% for a, b, c in messages %}{{ a }}{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{% set x = [] %}{{ x.pop() }}",
    "{{ 'x' * 10 ** 15 }}",
    "{{ 10 ** 10 ** 2 }}",
    "{{ dict(5) }}",
    "{{ cycler() }}",
    "{% break %}",
    "{% continue %}",
    "{% call messages() %}{% endcall %}",
    "{% filter nothing %}{% endfilter %}",
    "{% if %}{% endif %}",
    "{% generation %}",
    "{{",
    "{%",
    "}}",
    "{{ messages",
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ \x00 }}",
    "\ud800",
    "",
    "\x00",
    "no prompt at all",
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    "{{ messages[0].content | e | upper | trim | replace('A', '<tool_call>') }}",
    "<tool_call>{{ tool_call.name }}",
    5,
    [],
    {},
    ["x"],
    [{"name": "default"}],
    [{"template": "x"}],
    [{"name": "default", "template": 5}],
    [{"name": "other", "template": "x"}],
    {"default": "{{ 1 / 0 }}"},
    {"other": "x"},
    True,
]
_PIECES = ["{{", "}}", "{%", "%}", "{#", "'", "(", ")", "[", "|", ".", "0", " / 0", "x", "\n", "-"]
_PIECES += ["messages", "raise_exception(1)", "loop.x", "namespace()", "\x00", "∞", "99999999"]


def damage_text(text: str, rng: random.Random) -> str:
    """A text with a few pieces put in, cut out or doubled."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.randint(0, 8))
        put = rng.choice([*_PIECES, text[at:end] * 2])
        text = text[:at] + put + text[end if rng.random() < 0.5 else at :]
    return text


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """A file's bytes cut, empty, changed, in another encoding, or nested without end."""
    kind = rng.randrange(7)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        return rng.choice([b"", b"\xff\xfe", b"\xef\xbb\xbf" + content, b"null", b"[]", b"\0" * 99])
    if kind == 2:
        return b'{"a":' * 100_000
    if kind == 3:
        return b"[" * 900 + b"]" * 900
    if kind == 4:
        return content + b"x"
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):  # mostly in the first part, where a header is
        at = (
            int(len(changed) * rng.random() ** 4)
            if kind == 5
            else rng.randrange(min(99, len(changed)))
        )
        changed[at] = rng.randrange(256)
    return bytes(changed)
