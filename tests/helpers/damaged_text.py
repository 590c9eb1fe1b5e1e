"""Chat templates that are broken, or raise when they run."""

from __future__ import annotations

from typing import Any

TEMPLATES: list[Any] = [
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{{ nothing() }}",
    "{{ messages + 5 }}",
    "{{ messages[0].content + 5 }}",
    "{{ '{a.b}'.format(a=1) }}",
    "{{ messages | sort }}",
    "{{ raise_exception('roles\nmust\nalternate') }}",
    "{{ strftime_now(5) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'other' %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{% set x = [] %}{{ x.pop() }}",
    "{{ 'x' * 10 ** 15 }}",
    "{% break %}",
    "{% filter nothing %}{% endfilter %}",
    "{% generation %}",
    "{{",
    "{% for m in messages %}",
    "{{ \x00 }}",
    "\ud800",
    "",
    5,
    [],
    {},
    ["x"],
    [{"name": "default"}],
    [{"template": "x"}],
    {"default": "{{ 1 / 0 }}"},
    True,
]
