"""Errors of requests, in the formats of OpenAI, Anthropic and Ollama.

Clients react to some of them: they compact a conversation on `context_length_exceeded` or "prompt
is too long", and try again on 429 and 503.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import DFlashError, NotEnoughMemoryError, PromptError, SettingsError
from ..validation import error_text

RETRY_SECONDS: Final = 2  # after which clients may try again

# Status -> the error's `type`, which OpenAI and Anthropic name alike. 400 is the default.
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_CLIENT_ERRORS: Final = (SettingsError, PromptError, NotEnoughMemoryError)
_UNION_TAGS: Final = ("str", "int", "float", "bool")  # pydantic adds them to the path of a field


def new_id(prefix: str) -> str:
    """Make a random id with a prefix."""
    return f"{prefix}{secrets.token_hex(12)}"


class RequestError(DFlashError):
    """A request gets an error instead of an answer.

    Args:
        message: what is wrong and what to do, in one line.
        status: the HTTP status.
        code: OpenAI's code, if there is one.
        param: the field that is wrong.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.type = _TYPES.get(status, "invalid_request_error")
        self.anthropic_message = message

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        if self.retry_after is None:
            return {}
        seconds = str(self.retry_after)
        return {
            "Retry-After": seconds,  # for API clients
            "Refresh": seconds,  # for browsers
        }

    def openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        kind = "server_error" if self.status == 500 else self.type
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """Return the body in Anthropic's format."""
        error = {"type": self.type, "message": self.anthropic_message}
        return {"type": "error", "error": error, "request_id": request_id}

    def ollama(self) -> dict[str, Any]:
        """Return the body in Ollama's format."""
        return {"error": str(self)}


def shutting_down() -> RequestError:
    """Make the error of a request while the server stops."""
    return RequestError("The server is shutting down.", 503, retry_after=RETRY_SECONDS)


def too_long(tokens: int, max_tokens: int, param: str) -> RequestError:
    """Make the error of a prompt longer than `max_tokens`, in the words that clients look for."""
    error = RequestError(
        f"This model's maximum context length is {max_tokens + 1} tokens. However, your {param} "
        f"resulted in {tokens} tokens, and an answer needs one more. Please reduce the length of "
        f"the {param}.",
        code="context_length_exceeded",
        param=param,
    )
    error.anthropic_message = f"prompt is too long: {tokens} tokens > {max_tokens} maximum"
    return error


def from_validation(error: ValidationError) -> RequestError:
    """Make the error of a body that does not fit its model."""
    # The last error is about the last type of a union, a list or an object, which says most.
    errors = error.errors(include_url=False, include_input=False)
    last = errors[-1]
    path = last["loc"]
    names = [str(part) for part in path if isinstance(part, int) or _is_field(part)]
    if last["type"] == "unsupported":
        names.append(last["ctx"]["field"])
    param = ".".join(names)[:200]
    message = _message(last)
    # In a union the path ends with a type and not with a field. Then another type of the union may
    # list the words that are allowed.
    if path and not _is_field(str(path[-1])):
        choices = [
            detail
            for detail in errors
            if detail["type"] == "literal_error" and detail["loc"][:-1] == path[:-1]
        ]
        if choices and last not in choices:
            other = "a JSON schema" if last["type"].startswith("json") else "an object"
            words = choices[0]["ctx"]["expected"].removeprefix("'' or ")
            message = f"Input should be {words}, or {other}"
    return RequestError(f"{param}: {message}" if param else message, param=param or None)


def _message(error: ErrorDetails) -> str:
    """Say what is wrong, without names of classes."""
    if error["type"] in ("model_type", "dict_type"):
        return "Input should be an object" if error["loc"] else "The body should be a JSON object."
    return error["msg"]


def _is_field(part: str) -> bool:
    """Whether a part of an error's path is the name of a field."""
    return part.isidentifier() and part.islower() and part not in _UNION_TAGS


def from_library(error: BaseException) -> RequestError:
    """Make the error of a request that the engine refuses or cannot finish."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DFlashError):
        return RequestError(str(error), 400 if isinstance(error, _CLIENT_ERRORS) else 500)
    reason = f"{type(error).__name__}: {error_text(error)}"
    return RequestError(f"The answer could not be finished ({reason}).", 500)
