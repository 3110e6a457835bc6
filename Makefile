PYTHON ?= python3
PYTEST_ARGS ?=

.PHONY: help install compile interpret serve test lint format bench proto

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */: /'

install:         ## the project with what development needs, into the current environment
	$(PYTHON) -m pip install -e '.[dev]'

compile:         ## compile the hot modules in place (a few minutes); to be done again after every change of them
	SMG_COMPILE=1 $(PYTHON) setup.py -q build_ext --inplace

interpret:       ## remove the compiled modules
	rm -rf build smg__mypyc.*.so
	find smg -name '*.so' -delete

serve:           ## gateway and embedded engine on http://127.0.0.1:8080, no GPU, no download
	$(PYTHON) -m smg serve --backend sim --router-reasoning-parser qwen3 --router-tool-call-parser qwen

test:            ## the whole test suite
	$(PYTHON) -m pytest $(PYTEST_ARGS)

lint:            ## style, formatting, types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:          ## format in place
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench:           ## benchmarks that need nothing but this checkout
	@for script in tests/load/bench_*.py; do echo "== $$script"; PYTHONPATH=. $(PYTHON) $$script || exit 1; done

proto:           ## regenerate the protobuf modules of the worker protocols
	$(PYTHON) scripts/gen_proto.py
