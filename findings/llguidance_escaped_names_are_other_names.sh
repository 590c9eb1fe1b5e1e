#!/usr/bin/env bash
# Expected: text that llguidance's grammar of a JSON schema accepts is valid under the schema.
# Really: a property's name is compared as it is spelled. With an escape in it ("\u0061" for "a") it counts as another name, which
#   objects may have unless additionalProperties is false: its value is free, and a JSON parser puts it in the property's place.
# Seen: llguidance 1.9.1 against jsonschema 4.26.0, Python 3.13, Linux, 2026-11-28.
# Bites: whoever takes an answer under a schema without "additionalProperties": false for checked. Check it again after parsing.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "llguidance==1.9.1" "jsonschema==4.26.0"
"$folder/venv/bin/python" - <<'PY'
import json, sys
import jsonschema
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")

def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
text = r'{"a": 1, "\u0061": "x"}'
valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
results = accepts(schema, text), valid, accepts(schema | {"additionalProperties": False}, text)
print("%s means %s: the grammar accepts it: %s, it is valid: %s, accepted without other properties: %s" % (text, json.loads(text), *results))
sys.exit(0 if results == (True, False, False) else "llguidance has changed")
PY
