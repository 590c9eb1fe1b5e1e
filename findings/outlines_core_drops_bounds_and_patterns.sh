#!/usr/bin/env bash
# Expected: outlines-core's regular expression of a JSON schema enforces a keyword or refuses the schema, as it does for
#   "not". A "pattern" may match anywhere in the string, as JSON Schema says.
# Really: minimum, maximum, multipleOf and uniqueItems are dropped without a word, and so is the pattern of a string that
#   has a minLength or maxLength as well. A pattern alone must match the whole string, and "^a", without a $, keeps its ^
#   behind the opening quote, where no text can match. A name in "required" without a property is dropped.
# Seen: outlines-core 0.2.14, Python 3.11, on 2026-11-28.
# Bites: who moves a schema between engines for structured output, or trusts the answer without validating it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "outlines-core==0.2.14" "jsonschema==4.26.0"
"$folder/venv/bin/python" - <<'PY'
import json, re, sys
from jsonschema import validate, ValidationError
from outlines_core.json_schema import build_regex_from_schema
def is_valid(text, schema):
    try:
        validate(json.loads(text), schema)
    except ValidationError:
        return False
    return True
cases = [  # a schema, a text, whether outlines-core accepts it, whether it is valid
    ({"type": "integer", "minimum": 3}, "2", True, False),
    ({"type": "number", "multipleOf": 0.5}, "0.3", True, False),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]", True, False),
    ({"type": "string", "pattern": "^a+$"}, '"bb"', False, False),
    ({"type": "string", "pattern": "^a+$", "maxLength": 5}, '"bb"', True, False),
    ({"type": "string", "pattern": "a"}, '"bab"', False, True),
    ({"type": "string", "pattern": "^a"}, '"a"', False, True),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]}, '{"a":1}', True, False),
]
as_seen = True
for schema, text, accepted, valid in cases:
    found = bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))
    assert is_valid(text, schema) == valid
    print(f"{json.dumps(schema)}: {text} accepted: {found}, valid: {valid}")
    as_seen = as_seen and found == accepted
try:
    build_regex_from_schema('{"not": {"type": "integer"}}')
except (TypeError, ValueError):
    print('{"not": ...}: refused')
else:
    as_seen = False
sys.exit(0 if as_seen else "outlines-core has changed")
PY
