#!/usr/bin/env bash
# Expected: minijinja, which Rust servers use for chat templates, prints a number of a conversation as Jinja2 does.
# Really: it never prints an exponent: 1e-05 becomes 0.00001, 1e+20 becomes 100000000000000000000.0. Its tojson does write
#   exponents, but with other limits and digits than Python's: 0.00001 for 1e-05, 1e-7 for 1e-07. Other numbers agree.
# Seen: minijinja 3.1.0, jinja2 3.1.6, Python 3.11 and 3.13, on 2026-11-28.
# Bites: learning rates and tolerances in tool schemas and in arguments of earlier calls: two servers with one template
#   send the model other tokens, and prompts that one rendered are no prefix for the other.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "minijinja==3.1.0" "jinja2==3.1.6"
"$folder/venv/bin/python" - <<'PY'
import sys
import jinja2, minijinja
first, second = jinja2.Environment(), minijinja.Environment()
template = "{{ call.rate }} {{ call.rate|tojson }}"
seen = {}
for rate in (0.5, 1e-4, 1e-5, 1e-7, 1e15, 1e20):
    values = {"call": {"rate": rate}}
    seen[rate] = (first.from_string(template).render(**values), second.render_str(template, **values))
    print(f"{rate!r}: Jinja2 {seen[rate][0]} | minijinja {seen[rate][1]}")
expected = {
    0.5: ("0.5 0.5", "0.5 0.5"),
    1e-4: ("0.0001 0.0001", "0.0001 0.0001"),
    1e-5: ("1e-05 1e-05", "0.00001 0.00001"),
    1e-7: ("1e-07 1e-07", "0.0000001 1e-7"),
    1e15: ("1000000000000000.0 1000000000000000.0", "1000000000000000.0 1000000000000000.0"),
    1e20: ("1e+20 1e+20", "100000000000000000000.0 1e+20"),
}
sys.exit(0 if seen == expected else "Jinja2 or minijinja has changed")
PY
