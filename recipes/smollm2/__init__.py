"""How the drafter of SmolLM2-135M-Instruct was trained; `python -m smollm2` says how to run it."""
