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

# The first suitable Python that can create virtual environments; `make PYTHON3=/path/to/python …` selects one.
PYTHON3 ?= python3.11 python3.12 python3.13 python3
CAN_USE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
define FIND_PYTHON
found=; for candidate in $(PYTHON3); do \
  if $$candidate -c '$(CAN_USE)' >/dev/null 2>&1; then found=$$candidate; break; fi; done; \
if [ -z "$$found" ]; then \
  echo "cloister needs Python 3.11, 3.12 or 3.13 with its venv module (on Debian: python3-venv);" >&2; \
  echo "found none of $(PYTHON3). Install one, or select it: make PYTHON3=/path/to/python" >&2; exit 1; fi
endef

LINES ?= 4000
RUNS ?= 1
CASES ?= 10000
# Debian packages for a cluster with real nodes; it also needs Go and root.
CLUSTER_PACKAGES := containerd runc containernetworking-plugins iptables conntrack iproute2 buildah debootstrap openssh-server
MODEL ?= $(MODEL_DIR)
IMAGES ?= service ray-cpu ray-v100 ray-cuda13
NAME_LINES = $(if $(NAMED),2>&1 | sed --unbuffered 's/^/[$@] /')

.DEFAULT_GOAL := help
.PHONY: help setup model clients demo local test unit slow fuzz engine engine-stack engine-jobs test-cluster control-plane nodes cluster cluster-down cluster-packages conformance mutation lint typecheck format bench bench-full bench-compare render images lock clean distclean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/installed ## Create the virtual environment for all other targets

model: $(MODEL_DIR)/config.json ## Create the small demo model in build/demo_model

clients: $(BUILD)/clients/installed ## Install the client libraries of docs/clients.md in build/clients

demo: setup model ## Run two batches of 240 lines from upload to download on this machine, cold and warm
	@$(PYTHON) -m service.local.demo --model $(MODEL_DIR) --directory $(BUILD)/demo

local: setup ## Run `cloister local` in ./cloister-data
	@$(VENV)/bin/cloister local

# Engine tests wait for processes to start, so two targets run at a time. Each line shows its target.
test: setup model clients lint typecheck ## Run every check and every test (ARGS= for pytest: only those)
ifdef ARGS
	$(PYTHON) -m pytest $(ARGS)
else
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory --jobs=2 NAMED=1 engine-stack engine-jobs slow
endif

engine: engine-stack engine-jobs ## Run the tests with a real Ray and engines

engine-stack: setup model clients
	$(PYTHON) -m pytest -m ray --durations=10 tests/acceptance $(ARGS) $(NAME_LINES)

engine-jobs: setup model
	$(PYTHON) -m pytest -m ray --durations=10 --ignore tests/acceptance $(ARGS) $(NAME_LINES)

unit: setup ## Run the fast tests: no Ray, no engine, at most two minutes on two cores
	$(PYTHON) -m pytest -m "not ray and not slow" -n 3 --dist loadfile $(ARGS) $(NAME_LINES)

# In one process: some of these tests measure rates or put load on the API.
slow: setup ## Run the slow tests that need no engine: processes, load, fuzzing, crashes
	$(PYTHON) -m pytest -m "slow and not ray" --durations=15 $(ARGS) $(NAME_LINES)

fuzz: setup ## Send 10,000 generated requests to the API and check every answer (CASES=)
	CLOISTER_FUZZ_CASES=$(CASES) $(PYTHON) -m pytest -m slow tests/integration/test_openapi_fuzz.py

test-cluster: setup model ## Run the whole stack on a real Kubernetes on this machine (Go; nodes need root, see cluster)
	$(PYTHON) -m tests.cluster.build
	@$(PYTHON) -m tests.cluster.playground images
ifdef ARGS
	CLOISTER_CLUSTER_TESTS=1 $(PYTHON) -m pytest -m cluster $(ARGS)
else
	@$(MAKE) --no-print-directory --jobs=2 NAMED=1 control-plane nodes
endif

# Lower priority than the tests on nodes, which take three times as long. Much lower, and these tests time out.
control-plane: setup
	CLOISTER_CLUSTER_TESTS=1 nice -n 5 $(PYTHON) -m pytest -m "cluster and not nodes" --durations=10 tests/cluster $(NAME_LINES)

nodes: setup model
	CLOISTER_CLUSTER_TESTS=1 $(PYTHON) -m pytest -m nodes --durations=20 tests/cluster $(NAME_LINES)

cluster: setup model ## Start a Kubernetes with the stack, to try things (root, Go, cluster-packages)
	@$(PYTHON) -m tests.cluster.playground up

cluster-down: setup ## Remove that cluster, also after a crash
	@$(PYTHON) -m tests.cluster.playground down

cluster-packages: ## Install the Debian packages that real nodes need (root)
	apt-get update --quiet=2
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends $(CLUSTER_PACKAGES)

# The key is passed in the environment, which lists of processes do not show. MODEL's default is not a model id.
conformance: setup ## Check any server against OpenAI's contract (BASE_URL=, API_KEY=, MODEL=, ARGS=)
	@OPENAI_BASE_URL='$(BASE_URL)' OPENAI_API_KEY='$(API_KEY)' \
	  $(PYTHON) -m tests.conformance --model '$(filter-out $(MODEL_DIR),$(MODEL))' $(ARGS)

mutation: setup ## Check that unit tests notice changes of the pure core; see docs/mutation.md (AREAS=, SAMPLE=)
	nice -n 15 $(PYTHON) -m tests.mutation $(AREAS) $(if $(SAMPLE),--sample $(SAMPLE))

lint: setup ## Check style, security and import rules, and pinned packages for known vulnerabilities
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	@$(PYTHON) -m tests.dependency_audit

typecheck: setup ## Check types
	$(VENV)/bin/mypy

format: setup ## Format the code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: setup model ## Compare cloister with its bars on a simulated GPU, in ten minutes (ARGS=)
	@$(PYTHON) -m tests.bench $(ARGS)

bench-full: setup model ## Measure every case of the benchmark and validation; takes hours (ARGS=)
	$(PYTHON) -m tests.bench validation --output $(BUILD)/bench-validation.json
	@$(PYTHON) -m tests.bench --full $(ARGS)

bench-compare: setup model ## Compare run_batch, ray.data.llm and cloister on this machine (LINES=, RUNS=, MODEL=, ARGS=)
	$(PYTHON) -m tests.bench compare --lines $(LINES) --runs $(RUNS) --model $(MODEL) $(ARGS)

render: setup ## Write the manifests that a stack applies (STACK=, OUT=)
	@$(PYTHON) -m infra.rendering.render --stack '$(or $(STACK),dev)' --out '$(or $(OUT),$(BUILD)/manifests)'

images: ## Build the images with buildah, podman or docker (BASE=, BUILD_BASE=, REPOSITORY=, IMAGES=, PUSH=1)
	@BASE='$(BASE)' BUILD_BASE='$(BUILD_BASE)' REPOSITORY='$(REPOSITORY)' PUSH='$(PUSH)' images/build.sh $(IMAGES)

lock: setup ## Resolve the pinned versions of all environments again (UPGRADE=1)
	$(VENV)/bin/uv pip compile pyproject.toml --quiet --no-header --no-annotate $(if $(UPGRADE),--upgrade) \
	  --extra cpu --extra dev --extra infra --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --override constraints/cpu-overrides.txt --output-file constraints/cpu.txt
	$(VENV)/bin/uv pip compile constraints/clients.in --quiet --no-header --no-annotate $(if $(UPGRADE),--upgrade) \
	  --override constraints/clients-overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --output-file constraints/clients.txt
	for image in $(IMAGES); do case $$image in \
	  service) tested="--constraint constraints/cpu.txt" ;; \
	  ray-cpu) tested="--constraint constraints/cpu.txt --override constraints/cpu-overrides.txt" ;; \
	  *) tested= ;; esac; \
	  $(VENV)/bin/uv pip compile pyproject.toml images/constraints/$$image.in --quiet --no-header --no-annotate \
	    $(if $(UPGRADE),--upgrade) --only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	    $$tested --output-file images/constraints/$$image.txt || exit 1; done

clean: ## Remove build results, and keep the virtual environment
	rm -rf $(BUILD) *.egg-info .mypy_cache .ruff_cache .import_linter_cache

distclean: clean ## Also remove the virtual environment
	rm -rf $(VENV)

# Two steps, so that a change of the project's metadata does not install 250 packages again.
$(VENV)/installed: $(VENV)/packages pyproject.toml
	@echo "installing cloister itself (editable)"
	@$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --no-deps --editable .
	@touch $@

$(VENV)/packages: constraints/cpu.txt constraints/uv.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { $(FIND_PYTHON); \
	  echo "creating $(VENV) with $$($$found --version)"; $$found -m venv --clear $(VENV); }
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement constraints/uv.txt
	@echo "installing the packages of constraints/cpu.txt (about 6 GB on disk; once)"
	@$(VENV)/bin/uv pip install --python $(PYTHON) --no-deps --compile-bytecode --requirement constraints/cpu.txt
	@touch $@

$(BUILD)/clients/installed: $(VENV)/installed constraints/clients.txt
	@echo "installing the packages of constraints/clients.txt (about 440 MB on disk; once)"
	@$(VENV)/bin/uv venv --quiet --clear --python $(PYTHON) $(BUILD)/clients
	@$(VENV)/bin/uv pip install --quiet --python $(BUILD)/clients/bin/python --no-deps \
	  --requirement constraints/clients.txt
	@touch $@

$(MODEL_DIR)/config.json: $(VENV)/installed
	@echo "creating the demo model in $(MODEL_DIR) (once)"
	@$(PYTHON) -m ray_job.demo_model $(MODEL_DIR)
	@touch $@
