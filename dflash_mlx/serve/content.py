"""What messages hold: text, media that a text model cannot read, and records of other servers.

Whatever holds text is read. In place of what does not there is a line, and a word for a header of
the response. An agent sends its whole conversation each time, so nothing that an API has written
may end it.
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
from .request import instead_of

# What says nothing to a model.
_NAMES: Final = re.compile(
    r"id|\w+_id|type|status|signature|fingerprint|caller|cache_control|prompt_cache_breakpoint"
)
_ENCRYPTED: Final = re.compile(r"encrypted_\w+")
# A data URL, or base64 of some length: capitals, small letters and digits without a space.
_ENCODED: Final = re.compile(
    r"data:[^\s,]*,\S*|(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=\D*\d)[A-Za-z0-9+/=_-]{256,}"
)
# Records that would change what follows: tools, settings, the conversation itself.
_CHANGES: Final = re.compile(
    r"tool_(addition|removal)|mcp_(list_tools|tool_listing)|additional_tools|tool_search_output"
    r"|configuration_update|fallback|compaction_trigger"
)
# Content that may say something beside its text, which then is not all of it.
_MEDIA: Final = re.compile(r"(input_)?(image|audio|video|file)(_url)?|container_upload")

PartType = TypeVar("PartType")


def _as_list(content: Any) -> Any:
    """The list of parts that a client means by a single part, or by texts among parts."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        return parts
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]


ListOfParts = Annotated[ListOf[PartType], BeforeValidator(_as_list)]


class FileData(Body):
    """A file that a request brings."""

    file_data: str | None = None
    filename: str | None = None

    @property
    def file_text(self) -> str | None:
        """The text of a text file; None for any other, and for one that is elsewhere."""
        data = self.file_data or ""
        kind, _ = guess_type(self.filename or "")
        if match := re.match(r"data:(?P<kind>[^;,]*)[^,]*,", data):
            kind = match["kind"] or kind
        return decoded(data, kind)


def decoded(data: str, kind: str | None) -> str | None:
    """The text of a data URL or of base64, if its media type is one of text; else None."""
    if not (data and re.match(r"text/|application/(json|xml|yaml|toml)", kind or "")):
        return None
    is_url = data.startswith("data:")
    head, _, body = data.partition(",")
    if not is_url:
        body = data
    is_base64 = not is_url or head.endswith(";base64")
    with suppress(Error, UnicodeDecodeError):
        return (b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)).decode()
    return None


class Resource(Body):
    """A file that a tool of MCP brings."""

    text: str | None = None


class ContentPart(FileData):
    """A part of a message."""

    known: ClassVar[Collection[str]] = (
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
    source: str | Source | None = None  # a search result's is a text

    @property
    def own_text(self) -> str | None:
        """The text that the part holds; None if it holds none."""
        if self.type == "document" and isinstance(self.source, Source):
            text = self.source.own_text
            return None if text is None else lines(self.title, self.context, text)
        if self.type in self.known:
            return self.text or self.refusal or ""
        text = self.resource.text if self.resource else self.text
        is_all = text is not None and not _MEDIA.fullmatch(self.type)
        return text if is_all else (self.file or self).file_text

    @property
    def media(self) -> str | None:
        """The kind of an image, audio or a file; None for what is read."""
        if self.own_text is not None:
            return None
        return self.type.removeprefix("input_").removesuffix("_url")[:40]

    @property
    def left_out(self) -> list[str]:
        """Words for what the part has and no model here can read."""
        inner = self.source.content if isinstance(self.source, Source) else None
        return [*([self.media] if self.media else []), *left_out_of(inner)]

    def read(self) -> str:
        """The text, or a line in place of an image, audio or a file."""
        return self.own_text if self.own_text is not None else instead_of(self.media or "")


class Source(Body):
    """Where a document is."""

    type: str = ""
    media_type: str | None = None
    data: str | None = None
    content: str | ListOfParts[ContentPart] | None = None

    @property
    def own_text(self) -> str | None:
        """The document's text; None for a PDF, and for what is elsewhere."""
        if self.content is not None:
            return read_content(self.content, "\n")
        return self.data if self.type == "text" else decoded(self.data or "", self.media_type)


ContentPart.model_rebuild()  # the two classes name each other


def lines(*texts: str | None) -> str:
    """The texts that there are, a line each."""
    return "\n".join(text for text in texts if text)


class Record(Body):
    """What a tool or a service of another server left in a conversation, in any form; or media.

    It is read as JSON, without ids, and without what is encrypted or encoded.
    """

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def media(self) -> str | None:
        """The kind of an image, audio or a file; None for what is read."""
        return self.type if _MEDIA.fullmatch(self.type) else None

    @property
    def left_out(self) -> list[str]:
        """The record's kind, if it has what is not read, or would change what follows."""
        if self.media:
            return [self.media]
        fields = self.model_extra or {}
        whole = bool(_readable(fields)) and not _is_hidden(fields)
        return [] if whole and not _CHANGES.fullmatch(self.type) else [self.type[:40]]

    def read(self) -> str:
        """A line."""
        kind = self.type[:40]
        readable = _readable(self.model_extra or {})
        if self.media or not readable:
            return instead_of(kind)
        only = next(iter(readable.values())) if len(readable) == 1 else readable
        text = only if isinstance(only, str) else to_json(readable).decode()
        return f"[{kind}: {text}]"


def _readable(value: Any) -> Any:
    """JSON without what no model can read; None or empty if nothing is left."""
    if isinstance(value, str):
        return None if _ENCODED.fullmatch(value) else value
    if isinstance(value, Sequence):
        return [one for one in map(_readable, value) if one not in (None, "", [], {})]
    if not isinstance(value, Mapping):
        return value
    found = {
        name: _readable(one)
        for name, one in value.items()
        if not (_NAMES.fullmatch(name) or _ENCRYPTED.fullmatch(name))
    }
    return {name: one for name, one in found.items() if one not in (None, "", [], {})}


def _is_hidden(value: Any) -> bool:
    """Whether JSON has anything encrypted or encoded."""
    if isinstance(value, str):
        return _ENCODED.fullmatch(value) is not None
    if isinstance(value, Sequence):
        return any(map(_is_hidden, value))
    if not isinstance(value, Mapping):
        return False
    return any(
        _is_hidden(one) or (one and _ENCRYPTED.fullmatch(name)) for name, one in value.items()
    )


Part = ContentPart | Record
Content = str | Sequence[Part] | None


def read_message(role: str, content: Content, separator: str) -> dict[str, Any]:
    """A message as chat templates take it; see `GenerationRequest.prompt`."""
    parts = () if content is None or isinstance(content, str) else content
    message: dict[str, Any] = {"role": role, "content": read_content(content, separator)}
    if media := [part.media for part in parts if part.media]:
        message["media"] = media[0]
    if left_out := left_out_of(content):
        message["left_out"] = left_out
    return message


def left_out_of(content: Content) -> list[str]:
    """Words for what a message's content has and no model here can read."""
    parts = () if content is None or isinstance(content, str) else content
    return [word for part in parts for word in part.left_out]


def read_content(content: Content, separator: str) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part.read() for part in content)
