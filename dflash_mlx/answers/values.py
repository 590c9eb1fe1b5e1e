"""Reads arguments of calls as models write them, and types them by the schema of the tool.

Some families write values as bare text, where 123 may be a number or a string. The schema decides,
however it expresses the type. JSON is read as other servers read it: strings may contain line
breaks, and NaN, which is not JSON, is a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from ..validation import ErrorWrapper
from .literals import LiteralReader, NotACallError, Raw

Call = tuple[str, dict[str, Any]]  # the name, and arguments that are not typed yet
Schemas = Mapping[str, Any]  # the schemas of the arguments, by the names of the tools

# Names of types that models and schemas use -> the names in JSON schema.
_ALIASES: Final = {
    "str": "string",
    "text": "string",
    "enum": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_ALL: Final = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
# Types of Python -> their names in JSON schema. Any other type is a number.
_NAMES: Final = {
    str: "string",
    int: "integer",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}
_COMBINATIONS: Final = ("anyOf", "oneOf", "allOf")  # keywords for several schemas


class Parameters:
    """The names of a tool's parameters in its schema.

    Attributes:
        names: in order.
        all: as a set.
        required: those that every call needs.
    """

    def __init__(self, schema: Any) -> None:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        required = schema.get("required") if isinstance(schema, Mapping) else None
        self.names = list(properties) if isinstance(properties, Mapping) else []
        self.all = frozenset(self.names)
        self.required = frozenset(required if isinstance(required, list) else ()) & self.all


def _number(text: str) -> Any:
    """Keep all digits of a number. One that would be infinite as a float stays text."""
    return Decimal(text) if math.isfinite(float(text)) else text


_DECODER: Final = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=str)


def read_json(text: str, start: int = 0, lenient: bool = False) -> tuple[Any, int]:
    """Read the JSON value at `start`. Returns it and its end.

    `lenient` also accepts objects and lists with the mistakes that models make.

    Raises `NotACallError`.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        with ErrorWrapper(NotACallError, "not JSON", (ValueError, RecursionError)):
            return _DECODER.raw_decode(text, start)
    except NotACallError:
        if not (lenient and text[start : start + 1] in ("{", "[")):
            raise
    reader = LiteralReader(text, start, lenient=True)
    with ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,)):
        return reader.value(""), reader.position


def read_arguments(arguments: Any, lenient: bool = False) -> dict[str, Any]:
    """Read the arguments of a call, which are an object, JSON text, or None.

    Raises `NotACallError` for anything else.
    """
    if isinstance(arguments, str):
        text = arguments.strip()
        if not text:
            return {}
        arguments, end = read_json(text, 0, lenient)
        if text[end:].strip("} \n"):
            raise NotACallError("text behind the arguments")
    if arguments is None or arguments == []:  # PHP writes an empty object as a list
        return {}
    if not isinstance(arguments, dict):
        raise NotACallError("the arguments are not an object")
    return arguments


def typed_arguments(arguments: Mapping[str, Any], schema: Any) -> str:
    """Type the arguments by the tool's schema. Returns JSON text. Raises `NotACallError`."""
    with ErrorWrapper(NotACallError, "not JSON", (ValueError, RecursionError)):
        typed = _typed(dict(arguments), schema, schema)
        text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
    # Lone surrogates are not valid text.
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def allowed_types(
    schema: Any, root: Any, seen: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the JSON types that a schema allows.

    Args:
        schema: the schema.
        root: the document in which its references are resolved.
        seen: the results so far by the id of the schema, because references may be cyclic.
    """
    seen = {} if seen is None else seen
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return seen.get(id(schema), _ALL)
    seen[id(schema)] = _ALL
    types = _ALL
    declared = schema.get("type")
    if isinstance(declared, str | list):
        types &= _declared_types([declared] if isinstance(declared, str) else declared, schema)
    options = listed_values(schema)
    if options:
        types &= frozenset(_type_name(option) for option in options)
    if "$ref" in schema:
        types &= allowed_types(_resolve(schema["$ref"], root), root, seen)
    for keyword in _COMBINATIONS:
        inner = schema.get(keyword)
        if isinstance(inner, list) and inner:
            inner_types = [allowed_types(option, root, seen) for option in inner]
            if keyword == "allOf":
                types &= frozenset.intersection(*inner_types)
            else:
                types &= frozenset().union(*inner_types)
    seen[id(schema)] = types
    return types


def _declared_types(words: list[Any], schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that the words of a schema's `type` mean; all if none is known.

    Ollama's Python client joins the types of a union in one word: "integer, string".
    """
    names = set()
    for word in words:
        for part in str(word).lower().split(","):
            name = part.strip()
            names.add(_ALIASES.get(name, name))
    if "number" in names:
        names.add("integer")
    if schema.get("nullable") is True:
        names.add("null")
    return _ALL & names or _ALL


def _type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "number")


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that `enum` or `const` lists."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else []


def _resolve(reference: Any, root: Any) -> Any:
    """Return the schema that a reference within the document names; None for others."""
    if not str(reference).startswith("#"):
        return None
    schema = root
    for name in str(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _with_inner_schemas(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return a schema and the schemas that it refers to or combines, the outermost first."""
    schemas: list[Mapping[str, Any]] = []
    queue = [schema]
    seen = set()
    while queue:
        schema = queue.pop(0)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        schemas.append(schema)
        if "$ref" in schema:
            queue.append(_resolve(schema["$ref"], root))
        for keyword in _COMBINATIONS:
            if isinstance(schema.get(keyword), list):
                queue += schema[keyword]
    return schemas


def _typed(value: Any, schema: Any, root: Any) -> Any:
    """Type a value, and everything in it, by its schema."""
    if isinstance(value, Raw):
        return _read_text(str(value), schema, root)
    if isinstance(value, list):
        item_schema = _first_keyword("items", schema, root)
        return [_typed(item, item_schema, root) for item in value]
    if isinstance(value, dict):
        properties: dict[str, Any] = {}
        for inner in reversed(_with_inner_schemas(schema, root)):
            declared = inner.get("properties")
            if isinstance(declared, Mapping):
                properties |= declared
        default = _first_keyword("additionalProperties", schema, root)
        return {
            key: _typed(member, properties.get(key, default), root) for key, member in value.items()
        }
    if isinstance(value, Decimal):
        is_whole = value == value.to_integral_value()
        if is_whole and "number" not in allowed_types(schema, root):
            return int(value)
        return float(value)
    return value


def _first_keyword(keyword: str, schema: Any, root: Any) -> Any:
    """Return the value of a keyword in the outermost schema that has it, or None."""
    for inner in _with_inner_schemas(schema, root):
        if keyword in inner:
            return inner[keyword]
    return None


def _read_text(text: str, schema: Any, root: Any) -> Any:
    """Read a value of bare text. It is a string, unless the schema allows another type."""
    types = allowed_types(schema, root)
    listed: list[Any] = []
    for inner in _with_inner_schemas(schema, root):
        listed += listed_values(inner)
    if types == {"string"} or text in listed:
        return text
    value = _literal(text.strip(), guess="string" not in types)
    if isinstance(value, str):
        return text if "string" in types or not value else value
    value = _typed(value, schema, root)
    return text if "string" in types and _type_name(value) not in types else value


def _literal(text: str, guess: bool) -> Any:
    """Read the value of a JSON text. `guess` also reads Python's spelling.

    Returns the text itself if it is neither.
    """
    with suppress(NotACallError):
        value, end = read_json(text)
        if end == len(text):
            return value
    if not guess:
        return text
    word = text.lower().replace("none", "null")
    if word in ("true", "false", "null"):
        return json.loads(word)
    with suppress(ValueError):
        return int(text, 0)  # such as 0x1F or 1_000
    with suppress(ValueError):
        return _number(text)  # such as .5
    too_deep = ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,))
    with suppress(NotACallError), too_deep:
        reader = LiteralReader(text)
        value = reader.value("")
        if reader.position == len(text):
            return value
    return text
