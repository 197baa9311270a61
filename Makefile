# Everything a fresh machine needs: python3 with venv and pip, and make. Without a C compiler pip brings one for the build
# (builder/native_build.py).
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
BUILT_FROM := pyproject.toml setup.py builder/native_build.py $(wildcard quant/cpu/*.[ch] loader/program/*.[ch] serving/http/*.c)

.PHONY: help setup dev demo serve minilm dlrm test quick test-gpu test-sanitized check wheel bench campaign clean

help:            ## what there is
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.base

dev: $(VENV)/.dev

# The base: what loads, serves and looks up. A Python without its headers cannot build the native kernel; FBGEMM's stands in.
$(VENV)/.base: $(BUILT_FROM)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing tableside into $(VENV)"
	@$(PIP) install --editable .
	@$(BIN)/python -c 'import tableside.quant.cpu._native, tableside.loader.program._layers, tableside.serving.http._headers' 2>/dev/null || { \
		echo "the native kernel was not built (Python.h? Debian: apt-get install python3-dev); installing FBGEMM's, which is large"; \
		$(PIP) install --editable '.[fbgemm]'; }
	@touch $@

# And what tests, checks and benchmarks need.
$(VENV)/.dev: $(BUILT_FROM)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing tableside with what its tests need into $(VENV) (torch is large; a few minutes the first time)"
	@$(PIP) install --editable '.[dev]'
	@$(PIP) install tensordict torchmetrics==1.0.3 pyre-extensions tqdm
	@$(PIP) install --no-deps torchrec==1.8.0  # it requires FBGEMM's build for CUDA; tests use its tensors alone
	@touch $(VENV)/.base $@

demo: setup      ## make a model, load it, serve it with two workers, look up, compare, print a table
	@$(BIN)/python examples/demo.py

serve: setup     ## the demo's model, kept running, with the curl lines to try
	@$(BIN)/python examples/demo.py --keep-serving

minilm: dev      ## the word embeddings of a real public checkpoint, in every row format
	@$(BIN)/python examples/minilm/run.py

dlrm: dev        ## trains a small DLRM, publishes it in every row format, scores held-out rows over HTTP
	@$(BIN)/python examples/dlrm/run.py

test: dev        ## all tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

QUICK := tests/test_rooms.py tests/quant/test_row_format.py tests/loader/test_segment.py tests/loader/test_model.py \
	tests/loader/test_folder.py tests/loader/test_checkpoints.py tests/loader/test_program.py tests/loader/test_manifest.py \
	tests/serving/test_validation.py tests/serving/test_client.py tests/serving/test_client_forms.py \
	tests/serving/test_client_reading.py tests/serving/test_templates.py tests/serving/test_admission.py tests/serving/test_watch.py
quick: dev       ## a part of the tests, in under two minutes
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(QUICK)

GPU_TESTS := tests/quant tests/loader/test_registration.py $(addprefix tests/serving/,test_gpu.py test_batching.py test_score.py \
	test_eval.py)
test-gpu:        ## all tests that a GPU can run, on this machine's first GPU, with the torch that is here
	@$(PYTHON) -m pytest --device cuda:0 $(GPU_TESTS)

# no:faulthandler: it would take the signals that the sanitizers report.
WATCHED := $(BIN)/python builder/sanitized.py $(BIN)/python -m pytest -n 2 -p no:faulthandler
test-sanitized: dev  ## the tests of the C extensions, compiled with gcc's address and undefined-behaviour sanitizers
	@$(BIN)/python -m pytest tests/test_sanitizers.py
	@$(WATCHED) -k "native or a_plan_gives" tests/quant/test_native_jobs.py tests/quant/test_backends.py
	@$(WATCHED) tests/serving/test_templates.py tests/serving/test_validation.py tests/loader/test_program_layers.py

check: dev       ## ruff and mypy, over the rooms, benchmarks, campaigns and examples
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@mkdir -p build/types/tableside
	@ln -sfn $(CURDIR)/tableside/*.py $(CURDIR)/quant $(CURDIR)/loader $(CURDIR)/serving build/types/tableside
	@$(BIN)/mypy && $(BIN)/mypy benchmarks/*.py && $(BIN)/mypy campaigns examples

wheel:           ## a manylinux wheel in dist/, built without this machine's compiler, tried in an environment of its own
	@PYTHON=$(PYTHON) ./builder/make_wheel.sh

bench: dev       ## the benchmarks; results go to benchmarks/results
	@for b in cpu_lookup load http_lookup workers eval_pool; do $(BIN)/python benchmarks/$$b.py || exit 1; done

CAMPAIGN_S ?= 600
campaign: dev    ## kills, damage, hostile requests and files, overload, a soak: CAMPAIGN_S=3600 reaches every count
	@$(BIN)/python -m campaigns --seconds $(CAMPAIGN_S)

clean:           ## removes the virtual environment and build files
	rm -rf $(VENV) build dist *.egg-info quant/cpu/*.so loader/program/*.so
