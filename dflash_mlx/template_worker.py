"""A process that renders chat templates, which come with a model and may do anything.

`chat_template` starts this file by its path and ends it when a template takes too long. It imports
nothing but jinja2, so that it starts at once.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 2**29  # bytes that this process may have
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


@lru_cache(4)
def compiled(template: str) -> Any:
    """A template, with the filters and functions that transformers gives it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks an answer for training, and prints it as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **settings)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    del environment.globals["lipsum"]
    return environment.from_string(template)


def rendered(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """A template's "text", or the "error" that it ends with."""
    from jinja2 import TemplateError

    try:
        return {"text": compiled(template).render(variables)}
    except TemplateError as error:
        return {"error": str(error) or type(error).__name__}
    except ERRORS as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    """Answer requests on the socket that the first argument names, until it is closed."""
    socket = Connection(int(sys.argv[1]))
    with suppress(ImportError, OSError, ValueError):  # macOS has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    compiled("")  # import jinja2
    with suppress(EOFError, ConnectionError):
        socket.send_bytes(b"ready")
        while True:
            answer = rendered(**json.loads(socket.recv_bytes()))
            text = json.dumps(answer, ensure_ascii=False)
            socket.send_bytes(text.encode(errors="surrogatepass"))


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    main()
