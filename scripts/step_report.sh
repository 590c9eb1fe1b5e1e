#!/usr/bin/env bash
# Every figure of how steps are decoded, in turns with another checkout and with other systems.
#
#     scripts/step_report.sh OTHER_CHECKOUT [CORE]
#
# Takes some 40 minutes on one core of a machine that does nothing else. Run it in an environment
# with every extra ("make .venv/has-dev"); ports of others are installed in a temporary folder.
set -euo pipefail
before=$(realpath "$1")
core=${2:-0}
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

heading() { printf '\n== %s\n' "$1"; }

heading "The host's time for the graph of a verify"
taskset -c "$core" "$python" scripts/host_time.py
heading "Other ports, on equal ground"
"$python" scripts/ports.py --core "$core"
heading "Other ports, as they are installed"
"$python" scripts/ports.py --core "$core" --as-installed
for model in tiny smollm2; do
  heading "$model before and now"
  "$python" scripts/cpu_speed.py --core "$core" --models "$model" --against "$before" --bits 0
  for bias in 0 1; do
    heading "$model, many requests, logit bias $bias"
    "$python" scripts/many_requests.py --core "$core" --model "$model" --logit-bias $bias \
      --requests 1,2,4,8,16,32,64 --max-tokens 32
  done
done
heading "The first start of a machine"
"$python" scripts/first_start.py --core "$core" --against "$before"
heading "Random requests: each text is the one that decoding alone writes"
taskset -c "$core" "$python" tests/engine/test_random_requests.py 20000 | tail -1
