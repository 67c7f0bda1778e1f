# cloister: `make help` shows the targets.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c

VENV    := .venv
BUILD   := build
PYTHON  := $(VENV)/bin/python
MODEL_DIR := $(BUILD)/demo_model

# Without compiled bytecode every import of vLLM takes about twice as long.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH
unexport VIRTUAL_ENV
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

# The first Python that fits and can make virtual environments; `make PYTHON3=/path/to/python …` names one.
PYTHON3 ?= python3.11 python3.12 python3.13 python3
CAN_USE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
define FIND_PYTHON
found=; for candidate in $(PYTHON3); do \
  if $$candidate -c '$(CAN_USE)' >/dev/null 2>&1; then found=$$candidate; break; fi; done; \
if [ -z "$$found" ]; then \
  echo "cloister needs Python 3.11, 3.12 or 3.13 with its venv module (on Debian: python3-venv);" >&2; \
  echo "none of these is one: $(PYTHON3). Install one, or name it: make PYTHON3=/path/to/python" >&2; exit 1; fi
endef

LINES ?= 4000
RUNS ?= 1
# What a cluster with real nodes needs of Debian, besides Go and root.
CLUSTER_PACKAGES := containerd runc containernetworking-plugins iptables conntrack iproute2 buildah debootstrap
MODEL ?= $(MODEL_DIR)
LANES ?= service ray-cpu ray-v100 ray-a10g
NAME_LINES = $(if $(NAMED),2>&1 | sed --unbuffered 's/^/[$@] /')

.DEFAULT_GOAL := help
.PHONY: help setup model demo local test unit engine test-cluster control-plane nodes cluster cluster-down cluster-packages conformance lint typecheck format bench render images lock clean distclean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/installed ## Make the virtual environment with all that the other targets need

model: $(MODEL_DIR)/config.json ## Make the small demo model in build/demo_model

demo: setup model ## Run a batch of 240 lines from upload to download on this machine
	@$(PYTHON) -m service.local.demo --model $(MODEL_DIR) --directory $(BUILD)/demo

local: setup ## Run `cloister local` in ./cloister-data
	@$(VENV)/bin/cloister local

# What needs an engine waits much of its time: the other tests run beside it, and each line says whose it is.
test: setup model lint typecheck ## Run every check and every test (ARGS= for pytest: those alone)
ifdef ARGS
	$(PYTHON) -m pytest $(ARGS)
else
	@$(MAKE) --no-print-directory --jobs=2 NAMED=1 unit engine
endif

engine: setup model
	$(PYTHON) -m pytest -m ray $(ARGS) $(NAME_LINES)

unit: setup ## Run the tests that need neither Ray nor an engine
	$(PYTHON) -m pytest -m "not ray" $(ARGS) $(NAME_LINES)

test-cluster: setup model ## Run the whole stack on a real Kubernetes on this machine (Go; nodes need root, see cluster)
	$(PYTHON) -m tests.cluster.build
	@$(PYTHON) -m tests.cluster.playground images
ifdef ARGS
	CLOISTER_CLUSTER_TESTS=1 $(PYTHON) -m pytest -m cluster $(ARGS)
else
	@$(MAKE) --no-print-directory --jobs=2 NAMED=1 control-plane nodes
endif

# The tests on nodes take three times as long, so that those beside them step back a little: further, and they time out.
control-plane: setup
	CLOISTER_CLUSTER_TESTS=1 nice -n 5 $(PYTHON) -m pytest -m "cluster and not nodes" --durations=10 tests/cluster $(NAME_LINES)

nodes: setup model
	CLOISTER_CLUSTER_TESTS=1 $(PYTHON) -m pytest -m nodes --durations=20 tests/cluster $(NAME_LINES)

cluster: setup model ## Start a Kubernetes with the stack on it, to play with (root, Go, cluster-packages)
	@$(PYTHON) -m tests.cluster.playground up

cluster-down: setup ## Remove that cluster, also after a crash
	@$(PYTHON) -m tests.cluster.playground down

cluster-packages: ## Install the Debian packages that real nodes need (root)
	apt-get update --quiet=2
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends $(CLUSTER_PACKAGES)

# The key goes by the environment, where no list of processes shows it. MODEL has a default that is no model's id.
conformance: setup ## Check any server against OpenAI's contract (BASE_URL=, API_KEY=, MODEL=, ARGS=)
	@OPENAI_BASE_URL='$(BASE_URL)' OPENAI_API_KEY='$(API_KEY)' \
	  $(PYTHON) -m tests.conformance --model '$(filter-out $(MODEL_DIR),$(MODEL))' $(ARGS)

lint: setup ## Check style and import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

typecheck: setup ## Check types
	$(VENV)/bin/mypy

format: setup ## Rewrite the code in the one format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: setup model ## Measure validation; compare run_batch, ray.data.llm and cloister (LINES=, RUNS=, MODEL=)
	$(PYTHON) -m tests.bench validation --output $(BUILD)/bench-validation.json
	$(PYTHON) -m tests.bench --lines $(LINES) --runs $(RUNS) --model $(MODEL) --output $(BUILD)/bench.json

render: setup ## Write the manifests that a stack would apply (STACK=, OUT=)
	@$(PYTHON) -m infra.render --stack '$(or $(STACK),dev)' --out '$(or $(OUT),$(BUILD)/manifests)'

images: ## Build the images by buildah, podman or docker (BASE=, BUILD_BASE=, REPOSITORY=, LANES=, PUSH=1)
	@BASE='$(BASE)' BUILD_BASE='$(BUILD_BASE)' REPOSITORY='$(REPOSITORY)' PUSH='$(PUSH)' images/build.sh $(LANES)

lock: setup ## Resolve the pinned versions of all environments anew
	$(VENV)/bin/uv pip compile pyproject.toml --quiet --no-header --no-annotate $(if $(UPGRADE),--upgrade) \
	  --extra cpu --extra dev --extra infra --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --override constraints/cpu-overrides.txt --output-file constraints/cpu.txt
	for lane in $(LANES); do case $$lane in \
	  service) tested="--constraint constraints/cpu.txt" ;; \
	  ray-cpu) tested="--constraint constraints/cpu.txt --override constraints/cpu-overrides.txt" ;; \
	  *) tested= ;; esac; \
	  $(VENV)/bin/uv pip compile pyproject.toml images/constraints/$$lane.in --quiet --no-header --no-annotate \
	    $(if $(UPGRADE),--upgrade) --only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	    $$tested --output-file images/constraints/$$lane.txt || exit 1; done

clean: ## Remove what was built, and keep the virtual environment
	rm -rf $(BUILD) *.egg-info .mypy_cache .ruff_cache .import_linter_cache

distclean: clean ## Remove the virtual environment too
	rm -rf $(VENV)

# Two steps, so that a change of the project's own metadata does not install 250 packages again.
$(VENV)/installed: $(VENV)/packages pyproject.toml
	@echo "installing cloister itself (editable)"
	@$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --no-deps --editable .
	@touch $@

$(VENV)/packages: constraints/cpu.txt constraints/uv.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { $(FIND_PYTHON); \
	  echo "making $(VENV) with $$($$found --version)"; $$found -m venv --clear $(VENV); }
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement constraints/uv.txt
	@echo "installing the packages of constraints/cpu.txt (about 6 GB on disk; once)"
	@$(VENV)/bin/uv pip install --python $(PYTHON) --no-deps --compile-bytecode --requirement constraints/cpu.txt
	@touch $@

$(MODEL_DIR)/config.json: $(VENV)/installed
	@echo "making the demo model in $(MODEL_DIR) (once)"
	@$(PYTHON) -m ray_job.demo_model $(MODEL_DIR)
	@touch $@
