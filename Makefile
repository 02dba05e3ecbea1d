# Every target first installs what it needs into .venv; a second run finds it there and installs nothing.

PYTHON ?= python3
JOBS ?= 2
MPI ?= 1
RANKS ?= 4
TORCH ?= 1
CUDA ?= cuda12
ARGS ?=

# Tests start many processes, which read the bytecode of the package rather than compile it each time.
export PYTHONDONTWRITEBYTECODE :=

RUN := .venv/bin/python
STAMPS := .venv/.stamps
PYTEST := $(RUN) -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

# MPI comes as a wheel into .venv, unless MPICC names the compiler of another one.
ifdef MPICC
export MPICC
export MPIEXEC ?= $(dir $(shell command -v $(MPICC)))mpiexec
endif
MPI_STAMP := $(STAMPS)/mpi$(subst /,-,$(MPICC))

# The fastest tests that find the most errors, without MPI, notebooks and examples: test_NAME.py each.
QUICK := item_buffer presets published_numbers importance_weights groups n_step frames numbers \
  subset bitset distinct queue options rate_limiter sizes sampling_as_in_alf
QUICK_FILES := $(foreach name,$(QUICK),$(wildcard tests/*/test_$(name).py))

# What pip installs for each target, and what it is installed from: the kernels in C++ are built anew.
demo := --editable '.[examples]'
test := $(demo) --group test
site := --group docs
lint := $(demo) --group lint
docs := --editable . --group docs
wheel := --group wheel
benchmark := $(demo) --group benchmark
benchmark-$(CUDA) := $(benchmark) 'jax[$(CUDA)]'
PACKAGE := pyproject.toml CMakeLists.txt jaxbuf/core/native/kernels.cc

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo demo-mpi test test-all test-quick test-versions test-environments test-claims notebooks docs lint wheel format benchmark benchmark-torch benchmark-gpu benchmark-gpu-compiled benchmark-tpu-compiled clean

help:  ## list the targets
	@echo "make TARGET [ARGS='...'] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-22s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo  ## train DQN with prioritized replay on CartPole (ARGS: its options, e.g. --help)
	@$(RUN) examples/dqn.py $(ARGS)

# Open MPI starts no more ranks than there are cores unless told to; MPICH does.
demo-mpi: export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
demo-mpi: export OMPI_MCA_rmaps_base_oversubscribe ?= 1
demo-mpi: $(STAMPS)/demo $(MPI_STAMP)  ## train GFlowNets on several ranks with a shared buffer (RANKS: how many; ARGS)
	@$(or $(MPIEXEC),.venv/bin/mpiexec) -n $(RANKS) $(RUN) examples/gflownet_mpi.py $(ARGS)

test: $(STAMPS)/test $(if $(filter 0,$(MPI)),,$(MPI_STAMP))  ## run the tests of the library and its pages, about 10 minutes (MPI=0: without MPI; JOBS: processes; ARGS: for pytest)
	@MPI=$(MPI) $(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMPS)/test $(STAMPS)/site $(if $(filter 0,$(MPI)),,$(MPI_STAMP))  ## run all tests, half an hour: training, kills, notebooks, more MPI ranks as well (MPI, JOBS, ARGS)
	@MPI=$(MPI) $(PYTEST) $(ARGS)

test-quick: $(STAMPS)/test  ## run the tests for use while you work, a minute or two (JOBS: processes; ARGS: for pytest)
	@MPI=0 $(PYTEST) $(QUICK_FILES) $(ARGS)

test-versions:  ## run tests on each Python here with its newest jax, and with the oldest jax (SUITE=quick; PYTHONS)
	@PYTHON="$(PYTHON)" JOBS=$(JOBS) scripts/test_versions.sh $(if $(filter quick,$(SUITE)),$(QUICK_FILES)) $(ARGS)

test-environments:  ## run the guide's lines with the environment libraries that they are for (ARGS: some, by name)
	@PYTHON="$(PYTHON)" scripts/install_environments.sh
	@JAX_PLATFORMS=cpu .venv-environments/bin/python -m tests.environments $(ARGS)

test-claims:  ## check what the guides say of other libraries with the libraries themselves (ARGS: some, by name)
	@PYTHON="$(PYTHON)" scripts/install_claims.sh
	@JAX_PLATFORMS=cpu RL_LOGGING_LEVEL=WARNING .venv-claims/bin/python -m benchmarks.claims $(ARGS)

notebooks: $(STAMPS)/test $(if $(filter 0,$(MPI)),,$(MPI_STAMP))  ## run the notebooks again and keep what they show (ARGS: only some, by name)
	@$(RUN) -m notebooks $(ARGS)

# With --quiet mkdocs counts no warnings, and a strict build passes with broken links.
docs: $(STAMPS)/docs  ## build the site in site/ strictly, and look at its pages in a headless browser if there is one
	@echo "building the site (a minute or less)"
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(RUN) -m mkdocs build --strict --site-dir site
	@SITE=site $(RUN) -m pytest -q tests/project/test_site.py
	@echo "open site/index.html, or serve it: $(RUN) -m http.server --directory site"

lint: $(STAMPS)/lint  ## check style, docstrings and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@echo "checking types (a minute or less)"
	@$(RUN) -m pyright

wheel: $(STAMPS)/wheel  ## build a wheel and a source distribution in dist/
	@$(RUN) -m build --outdir dist .
	@for wheel in dist/*-linux_*.whl; do \
	  [ ! -e "$$wheel" ] || { PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) -m auditwheel repair --wheel-dir dist "$$wheel" && rm "$$wheel"; }; done

format: $(STAMPS)/lint  ## rewrite the code in the project's style
	@$(RUN) -m ruff check --fix-only .
	@$(RUN) -m ruff format .

benchmark: $(STAMPS)/benchmark $(if $(filter 0,$(MPI)),,$(MPI_STAMP))  ## time jaxbuf side by side with its peers (ARGS: its options; TORCH=0: without those that need torch)
	@[ "$(TORCH)" = 0 ] || $(MAKE) --no-print-directory benchmark-torch || \
	  echo "going on without torchgfn and torchrl: see the messages above"
	@$(RUN) -m benchmarks $(ARGS)

benchmark-torch: $(STAMPS)/python  ## install torchgfn and torchrl in an environment of their own (TORCH_INDEX: where torch is)
	@PYTHON="$(PYTHON)" scripts/install_torch.sh

benchmark-gpu: $(STAMPS)/benchmark-$(CUDA)  ## check and time jaxbuf and flashbax on one NVIDIA GPU (CUDA=cuda13: with that one; ARGS)
	@$(RUN) -m benchmarks.gpu $(ARGS)

benchmark-gpu-compiled: $(STAMPS)/python  ## count what the programs for an NVIDIA GPU do, without one (ARGS: its options)
	@PYTHON="$(PYTHON)" scripts/install_compiler.sh $(CUDA)
	@TF_CPP_MIN_LOG_LEVEL=3 .venv-cuda/bin/python -m benchmarks.compiled gpu $(ARGS)

benchmark-tpu-compiled: $(STAMPS)/python  ## count what the programs for a TPU do, without one (ARGS: its options, e.g. --check)
	@PYTHON="$(PYTHON)" scripts/install_compiler.sh tpu
	@TF_CPP_MIN_LOG_LEVEL=3 .venv-tpu/bin/python -m benchmarks.compiled tpu $(ARGS)

clean:  ## remove .venv and all that was built or cached
	rm -rf .venv .venv-torch .venv-cuda .venv-tpu .venv-versions .venv-environments .venv-claims .venv-claims-torch build dist .cache docs/notebooks site .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One empty file per finished installation; all of them go with .venv. pip is quiet, so each says that it has begun.

$(STAMPS)/python:
	@PYTHON="$(PYTHON)" GOAL="$(MAKECMDGOALS)" scripts/make_venv.sh
	@mkdir -p $(STAMPS) && touch $@

# Each target that needs MPI installs jaxlib before, whose headers mpi4jax is built with.
$(MPI_STAMP): | $(STAMPS)/python
	@rm -f $(STAMPS)/mpi*
	@scripts/install_mpi.sh
	@touch $@

$(STAMPS)/%: $(PACKAGE) $(STAMPS)/python
	@echo "installing what make $* needs (a minute or two)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-input $($*)
	@touch $@
