"""The drafter of SmolLM2-135M-Instruct; see README.md in this folder."""
