"""Keeps responses in memory, because later requests may refer to them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import to_json

from .http_errors import RequestError
from .responses import ResponsesBody
from .responses_input import InputItem, Item, RecordItem

MAX_BYTES: Final = 64 * 2**20
_ITEMS: Final = TypeAdapter(list[Item])


class ResponseStore:
    """Finished responses and their conversations. The least recently used are dropped first.

    Users find only their own responses. The salt of `Auth.check` tells users apart.

    Args:
        max_bytes: the most bytes of JSON to keep.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # (salt, id) -> the JSON of a response, and the JSON of all items of its conversation.
        self._entries: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()

    def add(self, salt: str, items: list[InputItem | RecordItem], response: dict[str, Any]) -> None:
        """Keep a response to a conversation of these items."""
        output = _ITEMS.validate_python(response["output"])
        conversation = _ITEMS.dump_json([*items, *output], exclude_none=True)
        entry = (to_json(response), conversation)
        self._entries[salt, response["id"]] = entry
        self._bytes += sum(map(len, entry))
        while self._bytes > self._max_bytes:
            self.remove(*next(iter(self._entries)))

    def get(self, salt: str, id: str) -> bytes:
        """Return the JSON of a response. Raises `RequestError` 404."""
        response, _ = self._find(salt, id)
        return response

    def remove(self, salt: str, id: str) -> None:
        """Forget a response. Raises `RequestError` 404."""
        self._bytes -= sum(map(len, self._find(salt, id)))
        del self._entries[salt, id]

    def conversation(self, salt: str, body: ResponsesBody) -> list[InputItem | RecordItem]:
        """Return all items of a request: first those of the response that it continues.

        Raises `RequestError` for a response or an item that is not stored.
        """
        items: list[InputItem | RecordItem] = []
        if body.previous_response_id is not None:
            try:
                items = self._stored_items(salt, body.previous_response_id)
            except RequestError as error:
                raise RequestError(
                    str(error),
                    status=400,
                    code="previous_response_not_found",
                    param="previous_response_id",
                ) from error
        for item in body.items:
            items.append(self._resolve(salt, item) if item.is_reference else item)
        return items

    def _find(self, salt: str, id: str) -> tuple[bytes, bytes]:
        """Return an entry, and mark it as used. Raises `RequestError` 404."""
        if (salt, id) not in self._entries:
            message = f"Response {id[:100]!r} is not stored, or not any more."
            raise RequestError(message, 404)
        self._entries.move_to_end((salt, id))
        return self._entries[salt, id]

    def _stored_items(self, salt: str, id: str) -> list[InputItem | RecordItem]:
        _, conversation = self._find(salt, id)
        return _ITEMS.validate_json(conversation)

    def _resolve(self, salt: str, reference: InputItem | RecordItem) -> InputItem | RecordItem:
        """Return the stored item that a reference means. Raises `RequestError`."""
        # The id of an item contains the id of its response: msg_RESPONSE_INDEX.
        _, _, ending = str(reference.id).partition("_")
        response_id = f"resp_{ending.partition('_')[0]}"
        if (salt, response_id) in self._entries:
            for item in self._stored_items(salt, response_id):
                if item.id == reference.id:
                    return item
        message = f"Item {str(reference.id)[:100]!r} is not stored: send the item itself."
        raise RequestError(message, param="input")
