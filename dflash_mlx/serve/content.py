"""The content of messages: text, media that a text model cannot read, records of other servers.

Text is read wherever it stands. Everything else becomes a line in the prompt and a word in a header
of the response. An agent sends its whole conversation each time, so a conversation must never fail
because of something that another API has written.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from mimetypes import guess_type
from typing import Annotated, Any, ClassVar, Final, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import BeforeValidator, ConfigDict
from pydantic_core import to_json

from .body import Body, ListOf
from .generation_request import media_placeholder

# Names of fields that mean nothing to a model.
_MEANINGLESS: Final = re.compile(
    r"id|\w+_id|type|status|signature|fingerprint|caller|cache_control|prompt_cache_breakpoint"
)
_ENCRYPTED: Final = re.compile(r"encrypted_\w+")
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
# A data URL, or long base64: upper case, lower case and digits without a space.
_ENCODED: Final = re.compile(
    r"data:[^\s,]*,\S*|(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=\D*\d)[A-Za-z0-9+/=_-]{256,}"
)
# Types of records that would change what follows: tools, settings, the conversation itself.
_CHANGES: Final = re.compile(
    r"tool_(addition|removal)|mcp_(list_tools|tool_listing)|additional_tools|tool_search_output"
    r"|configuration_update|fallback|compaction_trigger"
)


# Types of content that is more than its text.
_MEDIA: Final = re.compile(r"(input_)?(image|audio|video|file)(_url)?|container_upload")

PartType = TypeVar("PartType")


def _as_list(content: Any) -> Any:
    """Convert a single part, or texts among parts, to the list of parts that a client means."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        return parts
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


ListOfParts = Annotated[ListOf[PartType], BeforeValidator(_as_list)]


class FileData(Body):
    """A file in a request."""

    file_data: str | None = None
    filename: str | None = None

    @property
    def file_text(self) -> str | None:
        """The text of a text file; None for other files, and if the request has no data."""
        data = self.file_data or ""
        media_type, _ = guess_type(self.filename or "")
        match = re.match(r"data:(?P<type>[^;,]*)[^,]*,", data)
        if match is not None and match["type"]:
            media_type = match["type"]
        return decode_text(data, media_type)


def decode_text(data: str, media_type: str | None) -> str | None:
    """Decode the text of a data URL or of base64. Returns None if the media type is not text."""
    if not (data and re.match(r"text/|application/(json|xml|yaml|toml)", media_type or "")):
        return None
    head, _, body = data.partition(",")
    with suppress(Error, UnicodeDecodeError):
        if not data.startswith("data:"):
            return b64decode(data, validate=True).decode()
        if head.endswith(";base64"):
            return b64decode(body, validate=True).decode()
        return unquote_to_bytes(body).decode()
    return None


class Resource(Body):
    """A file in the result of an MCP tool."""

    text: str | None = None


class ContentPart(FileData):
    """A part of a message."""

    text_types: ClassVar[Collection[str]] = (
        "text",
        "input_text",
        "output_text",
        "refusal",
        "summary_text",
        "reasoning_text",
    )

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | ListOfParts[ContentPart] | None = None
    file: FileData | None = None
    resource: Resource | None = None
    title: str | None = None
    context: str | None = None
    source: str | Source | None = None  # the source of a search result is text

    @property
    def is_thinking(self) -> bool:
        """Whether the part is a thought."""
        return self.type == "thinking"

    @property
    def readable_text(self) -> str | None:
        """The text of the part; None if it has no text."""
        if self.type == "document" and isinstance(self.source, Source):
            text = self.source.readable_text
            return None if text is None else join_lines(self.title, self.context, text)
        if self.type in self.text_types:
            return self.text or self.refusal or ""
        text = self.resource.text if self.resource else self.text
        if text is not None and not _MEDIA.fullmatch(self.type):
            return text
        return (self.file or self).file_text

    @property
    def media(self) -> str | None:
        """The kind of an image, audio or a file; None for text."""
        if self.readable_text is not None:
            return None
        return self.type.removeprefix("input_").removesuffix("_url")[:40]

    @property
    def left_out(self) -> list[str]:
        """Words for content that a text model cannot read."""
        words = [self.media] if self.media else []
        if isinstance(self.source, Source):
            words += left_out_words(self.source.content)
        return words

    def read(self) -> str:
        """Return the text, or a line in place of an image, audio or a file."""
        text = self.readable_text
        return media_placeholder(self.media or "") if text is None else text


class Source(Body):
    """The source of a document."""

    type: str = ""
    media_type: str | None = None
    data: str | None = None
    content: str | ListOfParts[ContentPart] | None = None

    @property
    def readable_text(self) -> str | None:
        """The document's text; None for a PDF, and if the request does not contain it."""
        if self.content is not None:
            return read_content(self.content, "\n")
        return self.data if self.type == "text" else decode_text(self.data or "", self.media_type)


ContentPart.model_rebuild()  # because it refers to `Source`, which is defined later


def join_lines(*texts: str | None) -> str:
    """Join the texts that are not empty, one on each line."""
    return "\n".join(text for text in texts if text)


class Record(Body):
    """A record that a tool or a service of another server left in a conversation; or media.

    It may have any form. It is read as JSON, without ids, and without encrypted or encoded parts.
    """

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def media(self) -> str | None:
        """The kind of an image, audio or a file; None for a record."""
        return self.type if _MEDIA.fullmatch(self.type) else None

    @property
    def left_out(self) -> list[str]:
        """The record's type, if parts of it are not read, or if it would change what follows."""
        if self.media:
            return [self.media]
        fields = self.model_extra or {}
        is_read = bool(_readable(fields)) and not _has_hidden(fields)
        return [] if is_read and not _CHANGES.fullmatch(self.type) else [self.type[:40]]

    def read(self) -> str:
        """Return the record as a line."""
        kind = self.type[:40]
        readable = _readable(self.model_extra or {})
        if self.media or not readable:
            return media_placeholder(kind)
        text = to_json(readable).decode()
        if len(readable) == 1:
            value = next(iter(readable.values()))
            if isinstance(value, str):
                text = value
        return f"[{kind}: {text}]"


def _readable(value: Any) -> Any:
    """Remove the parts of JSON that no model can read. Returns None or empty if nothing is left."""
    if isinstance(value, str):
        return None if _ENCODED.fullmatch(value) else value
    if isinstance(value, Sequence):
        return [item for item in map(_readable, value) if item not in _EMPTY]
    if not isinstance(value, Mapping):
        return value
    readable = {}
    for name, member in value.items():
        if _MEANINGLESS.fullmatch(name) or _ENCRYPTED.fullmatch(name):
            continue
        text = _readable(member)
        if text not in _EMPTY:
            readable[name] = text
    return readable


def _has_hidden(value: Any) -> bool:
    """Whether any part of JSON is encrypted or encoded."""
    if isinstance(value, str):
        return _ENCODED.fullmatch(value) is not None
    if isinstance(value, Sequence):
        return any(map(_has_hidden, value))
    if not isinstance(value, Mapping):
        return False
    return any(
        _has_hidden(member) or (member and _ENCRYPTED.fullmatch(name))
        for name, member in value.items()
    )


Part = ContentPart | Record
Content = str | Sequence[Part] | None


def read_message(role: str, content: Content, separator: str) -> dict[str, Any]:
    """Convert a message for a chat template, in the form of `GenerationRequest.prompt`."""
    parts = () if content is None or isinstance(content, str) else content
    message: dict[str, Any] = {"role": role, "content": read_content(content, separator)}
    media = [part.media for part in parts if part.media]
    if media:
        message["media"] = media[0]
    left_out = left_out_words(content)
    if left_out:
        message["left_out"] = left_out
    return message


def left_out_words(content: Content) -> list[str]:
    """Return words for the parts of a message's content that a text model cannot read."""
    parts = () if content is None or isinstance(content, str) else content
    return [word for part in parts for word in part.left_out]


def read_content(content: Content, separator: str) -> str:
    """Return the text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part.read() for part in content)
