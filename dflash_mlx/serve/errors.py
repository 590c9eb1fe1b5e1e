"""What a client is told when it is not answered: one refusal, and the form each dialect gives it.

Clients act on some of these words: they compact a conversation on `context_length_exceeded` or
"prompt is too long", and try again later on 429, 503 and 529.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import ValidationError

from ..errors import DFlashError, NotEnoughMemoryError, PromptError, SettingsError

RETRY_SECONDS: Final = 2  # after which a client may find what it did not find now

# status -> the `type` of an error: of OpenAI, of Anthropic
_TYPES: Final = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("request_too_large", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}


# What a client can mend by asking for something else, or for less
_OF_CLIENTS: Final = (SettingsError, PromptError, NotEnoughMemoryError)
# What begins a message of pydantic's, or is in it -> how it is said here
_PLAIN: Final = (
    ("^Value error, ", ""),
    ("^Field required$", "is missing"),
    ("^(Input|List|String|Dictionary|Value) should (be|have|match)", r"must \2"),
    (" after validation|, unable to parse string as an? (integer|number)", ""),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
)


class Refusal(DFlashError):
    """A request that is not answered, and why.

    Args:
        message: what is wrong and what to do, in a line.
        status: of HTTP.
        code: OpenAI's word for it, if there is one.
        param: the field that is wrong.
        retry_after: seconds after which it may go better.
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
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def openai(self) -> dict[str, Any]:
        """As OpenAI says it."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES[self.status][0],
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """As Anthropic says it."""
        error = {"type": _TYPES[self.status][1], "message": str(self)}
        return {"type": "error", "error": error, "request_id": request_id}


class TooLong(Refusal):
    """A prompt that leaves no room for an answer; each dialect has words of its own for it.

    Args:
        tokens: of the prompt.
        most: that there is room for beside one token of an answer.
        param: the field that they came in.
        counted: whether there are as many, and not only as many or more.
    """

    def __init__(self, tokens: int, most: int, param: str, counted: bool = True) -> None:
        self._or_more = "" if counted else f" ({tokens} or more: so long a prompt is not counted.)"
        super().__init__(
            f"This model's maximum context length is {most + 1} tokens. However, your {param} "
            f"resulted in {tokens} tokens, and an answer needs one more. Please reduce the length "
            f"of the {param}.{self._or_more}",
            code="context_length_exceeded",
            param=param,
        )
        self._tokens, self._most = tokens, most

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """As Anthropic says it."""
        form = super().anthropic(request_id)
        form["error"]["message"] = (
            f"prompt is too long: {self._tokens} tokens > {self._most} maximum{self._or_more}"
        )
        return form


def of_validation(error: ValidationError) -> Refusal:
    """What is wrong with a body: a field that does not fit."""
    # Of a field that may be of several kinds the last one is the most telling: a list, an object.
    last = error.errors(include_url=False, include_input=False, include_context=False)[-1]
    names = [str(part) for part in last["loc"] if isinstance(part, int) or _is_name(part)]
    param = ".".join(names)[:200]
    message = _plain(last["msg"])
    return Refusal(f"{param}: {message}" if param else message, param=param or None)


def _plain(message: str) -> str:
    """What pydantic says of a value, without its own words for values and for checking them."""
    for theirs, ours in _PLAIN:
        message = re.sub(theirs, ours, message)
    return message


def _is_name(part: str) -> bool:
    """Whether a step to a wrong value is a field, not the kind that a value was taken for."""
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool")


def of_library(error: DFlashError) -> Refusal:
    """A request that the engine refuses, or one that it cannot finish."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, _OF_CLIENTS):
        return Refusal(str(error))
    return Refusal(str(error), 500)
