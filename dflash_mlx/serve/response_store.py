"""Responses that later requests refer to, in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import to_json

from .errors import RequestError
from .responses import ResponsesBody
from .responses_input import InputItem, Item, RecordItem

MAX_BYTES: Final = 64 * 2**20
_ITEMS: Final = TypeAdapter(list[Item])


class ResponseStore:
    """Finished responses and their conversations; the least recently used go first.

    Each user, by the salt of `Auth.check`, finds only their own.

    Args:
        max_bytes: the most bytes of JSON to keep.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        # By salt and id: the JSON of a response, and of all items of its conversation.
        self._entries: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()

    def add(self, salt: str, items: list[InputItem | RecordItem], response: dict[str, Any]) -> None:
        """Keep a response to a conversation of these items."""
        output = _ITEMS.validate_python(response["output"])
        entry = to_json(response), _ITEMS.dump_json([*items, *output], exclude_none=True)
        self._entries[salt, response["id"]] = entry
        self._bytes += sum(map(len, entry))
        while self._bytes > self._max_bytes:
            self.remove(*next(iter(self._entries)))

    def get(self, salt: str, id: str) -> bytes:
        """The JSON of a response. Raises `RequestError`, a 404."""
        return self._find(salt, id)[0]

    def remove(self, salt: str, id: str) -> None:
        """Forget a response. Raises `RequestError`, a 404."""
        self._bytes -= sum(map(len, self._find(salt, id)))
        del self._entries[salt, id]

    def conversation(self, salt: str, body: ResponsesBody) -> list[InputItem | RecordItem]:
        """All items of a request: those of the response that it continues, then its own.

        Raises `RequestError` for a response or an item that is not stored.
        """
        items: list[InputItem | RecordItem] = []
        if body.previous_response_id is not None:
            try:
                items = _ITEMS.validate_json(self._find(salt, body.previous_response_id)[1])
            except RequestError as error:
                code = "previous_response_not_found"
                raise RequestError(str(error), 400, code, "previous_response_id") from error
        for item in body.items:
            items.append(self._item(salt, item) if item.is_reference else item)
        return items

    def _find(self, salt: str, id: str) -> tuple[bytes, bytes]:
        if (salt, id) not in self._entries:
            message = f"Response {id[:100]!r} is not stored, or not any more."
            raise RequestError(message, 404)
        self._entries.move_to_end((salt, id))
        return self._entries[salt, id]

    def _item(self, salt: str, reference: InputItem | RecordItem) -> InputItem | RecordItem:
        """The item of a response that a reference means; its id has the response's in it."""
        writer = f"resp_{str(reference.id).partition('_')[2].partition('_')[0]}"
        if (salt, writer) in self._entries:
            for item in _ITEMS.validate_json(self._find(salt, writer)[1]):
                if item.id == reference.id:
                    return item
        message = f"Item {str(reference.id)[:100]!r} is not stored: send the item itself."
        raise RequestError(message, param="input")
