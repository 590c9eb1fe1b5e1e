#!/usr/bin/env bash
# Expected: in a grammar `start: json | call`, where call begins with the text {"name": "f", both alternatives stay open until a letter
# decides between them. Each of them alone takes its text.
# Really: llguidance cuts the text into lexemes greedily before it parses. After {" only the literal goes on, so no object of the JSON
# schema can be written: {"a": 1} is taken up to its third character. With a literal that begins otherwise both work.
# Seen: llguidance 1.9.1, Python 3.11, Linux, 2026-11-28.
# Bites: servers that let a model answer by a schema or call a tool, for families whose calls are JSON without a marker (Llama 3).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "llguidance==1.9.1"
"$folder/venv/bin/python" - <<'PY'
import sys
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def taken(start, call, text):
    """How much of a text the grammar takes."""
    lark = f"start: {start}\njson: %json {schema}\ncall: {call}"
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
    return text[: matcher.try_consume_tokens(list(text.encode()))]


as_json, marked = '"{\\"name\\": \\"f\\"" "}"', '"<call>" "}"'
found = [
    taken("json | call", as_json, '{"a": 1}'),
    taken("json | call", as_json, '{"name": "f"}'),
    taken("json | call", marked, '{"a": 1}'),
    taken("json", as_json, '{"a": 1}'),
]
print(found)
right = ['{"', '{"name": "f"}', '{"a": 1}', '{"a": 1}']
sys.exit(0 if found == right else "llguidance has changed")
PY
