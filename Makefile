# Everything a fresh machine needs: python3 with venv and pip, and make. A C compiler is installed where that is possible;
# without one the native kernel is left out and lookups run on FBGEMM's operator.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml $(wildcard quant/cpu/*.c quant/cpu/*.h)

.PHONY: help setup demo serve minilm dlrm test quick test-gpu check bench campaign clean

help:            ## what there is
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(STAMP)

$(STAMP): $(SOURCES)
	@./docker/compiler.sh
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch is large; a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,test]'
	@touch $@

demo: setup      ## make a model, load it, serve it with two workers, look up, compare, print a table
	@$(BIN)/python examples/demo.py

serve: setup     ## the demo's model, kept running, with the curl lines to try
	@$(BIN)/python examples/demo.py --keep-serving

minilm: setup    ## the word embeddings of a real public checkpoint, in every row format
	@$(BIN)/python examples/minilm/run.py

dlrm: setup      ## trains a small DLRM, publishes it in every row format, scores held-out rows over HTTP
	@$(BIN)/python examples/dlrm/run.py

test: setup      ## all tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

QUICK := tests/test_rooms.py tests/quant/test_row_format.py tests/loader/test_segment.py tests/loader/test_model.py \
	tests/loader/test_folder.py tests/loader/test_checkpoints.py tests/loader/test_program.py tests/loader/test_manifest.py \
	tests/serving/test_validation.py tests/serving/test_client.py tests/serving/test_admission.py tests/serving/test_watch.py
quick: setup     ## a part of the tests, in under two minutes
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(QUICK)

test-gpu:        ## the tests of GPU kernels, placements and registration, on this machine's first GPU, with the torch that is here
	@$(PYTHON) -m pytest --device cuda:0 tests/quant/test_fused.py tests/quant/test_cache.py tests/quant/test_backends.py \
		tests/loader/test_registration.py tests/serving/test_gpu.py -k 'fused or cache or gpu or registration or beyond or placement'

check: setup     ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@mkdir -p build/types/tableside
	@ln -sfn $(CURDIR)/tableside/*.py $(CURDIR)/quant $(CURDIR)/loader $(CURDIR)/serving build/types/tableside
	@$(BIN)/mypy

bench: setup     ## the benchmarks; results go to benchmarks/results
	@for b in cpu_lookup load http_lookup workers eval_pool; do $(BIN)/python benchmarks/$$b.py || exit 1; done

CAMPAIGN_S ?= 600
campaign: setup  ## kills, damage, hostile requests and files, overload, a soak: CAMPAIGN_S=3600 reaches every count
	@$(BIN)/python -m campaigns --seconds $(CAMPAIGN_S)

clean:           ## removes the virtual environment and build files
	rm -rf $(VENV) build *.egg-info quant/cpu/*.so
