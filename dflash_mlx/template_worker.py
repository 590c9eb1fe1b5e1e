"""Renders chat templates; it runs in the process of a `Worker`."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class Generation(Extension):
    """{% generation %} marks an answer for training, and prints it as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """See jinja2."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


@lru_cache(4)
def compiled(template: str) -> Any:
    """A template, with the filters and functions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    del environment.globals["lipsum"]
    return environment.from_string(template)


def render(request: bytes) -> bytes:
    """A JSON object with a template's "text", or with the "error" that it ends with.

    The request is one, too, with the "template" and its "variables".
    """
    asked = json.loads(request)
    try:
        answer = {"text": compiled(asked["template"]).render(asked["variables"])}
    except TemplateError as error:
        answer = {"error": str(error) or type(error).__name__}
    except ERRORS as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")
