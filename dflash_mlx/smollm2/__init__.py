"""The drafter of SmolLM2-135M-Instruct; see README.md beside this file."""
