# Every target first installs what it needs into .venv; a second run finds it there and installs nothing.

PYTHON ?= python3
JOBS ?= 2
MPI ?= 1
RANKS ?= 4
TORCH ?= 1
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input
INSTALL := $(RUN) $(PIP_INSTALL)

# torchgfn needs another NumPy than jaxbuf, so it lives in an environment of its own, and torchrl with
# it. Where torchrl's wheel does not fit this torch, TORCHRL can name a folder with its source.
TORCH_VENV := .venv-torch
TORCHRL ?= torchrl
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# The CUDA that jax brings along for the benchmark on a GPU; the driver is that of the machine. Its
# compiler alone, without a GPU, has an environment of its own: elsewhere jax would look for one.
CUDA ?= cuda12
CUDA_VENV := .venv-cuda

# pip is quiet, so each installation says that it has begun; how long it takes is up to the network.
comma := ,
INSTALLING = @echo "installing $(1) ($(or $(2),a minute or two))"

# What an installation of the package is made from: with the kernels in C++ it is made anew.
PACKAGE := pyproject.toml CMakeLists.txt jaxbuf/core/native/kernels.cc

# One empty file per finished installation, all of them gone when .venv is made anew.
STAMPS := $(VENV)/.stamps
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
BASE := $(STAMPS)/python-$(PYTHON_VERSION)

# MPI comes as a wheel into .venv, unless MPICC names the compiler of another one.
ifdef MPICC
MPI_COMPILER := $(shell command -v $(MPICC) || echo $(MPICC))
export MPIEXEC ?= $(dir $(MPI_COMPILER))mpiexec
else
MPI_COMPILER := $(abspath $(VENV)/bin/mpicc)
endif
MPI_STAMP := $(STAMPS)/mpi$(if $(MPICC),$(subst /,-,$(MPI_COMPILER)))

# What tells most in least time, without MPI, notebooks and examples: tests/test_NAME.py each.
QUICK := item_buffer presets published_numbers importance_weights groups n_step frames numbers \
  subset bitset distinct queue options rate_limiter sizes sampling_as_in_alf

TEST_NEEDS := $(STAMPS)/test
ifneq ($(MPI),0)
TEST_NEEDS += $(MPI_STAMP)
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo demo-mpi test test-quick notebooks docs lint wheel format benchmark benchmark-torch benchmark-gpu benchmark-gpu-compiled clean

help:  ## list the targets
	@echo "make TARGET [ARGS='...'] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-22s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo  ## train DQN with prioritized replay on CartPole (ARGS: its options, e.g. --help)
	@$(RUN) -m jaxbuf.examples.dqn $(ARGS)

# Open MPI starts no more ranks than there are cores unless told to; MPICH does.
demo-mpi: export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
demo-mpi: export OMPI_MCA_rmaps_base_oversubscribe ?= 1
demo-mpi: $(STAMPS)/demo $(MPI_STAMP)  ## train GFlowNets on several ranks with a shared buffer (RANKS: how many; ARGS)
	@$(or $(MPIEXEC),$(VENV)/bin/mpiexec) -n $(RANKS) $(RUN) -m jaxbuf.examples.gflownet_mpi $(ARGS)

test: $(TEST_NEEDS)  ## run all tests and doctests (MPI=0: without MPI; JOBS: processes; ARGS: for pytest)
	@MPI=$(MPI) $(RUN) -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-quick: $(STAMPS)/test  ## run the tests for use while you work, a minute or two (JOBS: processes; ARGS: for pytest)
	@MPI=0 $(RUN) -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder \
	  $(QUICK:%=tests/test_%.py) $(ARGS)

notebooks: $(TEST_NEEDS)  ## run the notebooks again and keep what they show (ARGS: only some, by name)
	@$(RUN) -m notebooks $(ARGS)

docs: $(STAMPS)/docs  ## build the site in site/ strictly, and look at its pages in a headless browser if there is one
	@echo "building the site (a minute or less)"
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --site-dir site
	@SITE=site $(RUN) -m pytest -q tests/test_site.py
	@echo "open site/index.html, or serve it: $(RUN) -m http.server --directory site"

lint: $(STAMPS)/lint  ## check style, docstrings and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@echo "checking types (a minute or less)"
	@$(RUN) -m pyright

wheel: $(STAMPS)/wheel  ## build a wheel and a source distribution in dist/
	@$(RUN) -m build --outdir dist .
	@for wheel in dist/*-linux_*.whl; do \
	  [ ! -e "$$wheel" ] || { $(RUN) -m auditwheel repair --wheel-dir dist "$$wheel" && rm "$$wheel"; }; done

format: $(STAMPS)/lint  ## rewrite the code in the project's style
	@$(RUN) -m ruff check --fix-only .
	@$(RUN) -m ruff format .

benchmark: $(STAMPS)/benchmark  ## time jaxbuf side by side with its peers (ARGS: its options; TORCH=0: without those that need torch)
ifneq ($(TORCH),0)
	@$(MAKE) --no-print-directory benchmark-torch || echo "going on without torchgfn and torchrl: see the messages above"
endif
	@$(RUN) -m benchmarks $(ARGS)

benchmark-torch: $(TORCH_VENV)/.installed  ## install torchgfn and torchrl in an environment of their own (TORCH_INDEX: where torch is)

benchmark-gpu: $(STAMPS)/benchmark-$(CUDA)  ## check and time jaxbuf and flashbax on one NVIDIA GPU (CUDA=cuda13: with that one; ARGS)
	@$(RUN) -m benchmarks.gpu $(ARGS)

benchmark-gpu-compiled: $(CUDA_VENV)/.installed  ## count what the programs for an NVIDIA GPU do, without one (ARGS: its options)
	@TF_CPP_MIN_LOG_LEVEL=3 $(CUDA_VENV)/bin/python -m benchmarks.gpu_compiled $(ARGS)

clean:  ## remove .venv and all that was built or cached
	rm -rf $(VENV) $(TORCH_VENV) $(CUDA_VENV) build dist .cache docs/notebooks site .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installing

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxbuf needs Python 3.11 or newer; $(PYTHON) is $(or $(PYTHON_VERSION),not found)." >&2; \
	  echo "Name one that is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@if $(RUN) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYTHON_VERSION)")' 2>/dev/null; \
	then echo "using the $(VENV) that is here (Python $(PYTHON_VERSION))"; \
	else echo "creating $(VENV) with Python $(PYTHON_VERSION)"; $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@$(INSTALL) --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf and what its examples need)
	@$(INSTALL) --editable '.[examples]'
	@touch $@

$(STAMPS)/test: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf$(comma) its examples and the test tools)
	@$(INSTALL) --editable '.[examples]' --group test
	@touch $@

$(STAMPS)/docs: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf and what its site is built with)
	@$(INSTALL) --editable . --group docs
	@touch $@

$(STAMPS)/lint: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf$(comma) its examples and the linters)
	@$(INSTALL) --editable '.[examples]' --group lint
	@touch $@

$(STAMPS)/wheel: pyproject.toml $(BASE)
	$(call INSTALLING,what wheels are built with,a moment)
	@$(INSTALL) --group wheel
	@touch $@

$(STAMPS)/benchmark: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf$(comma) its examples and the libraries it is measured against)
	@$(INSTALL) --editable '.[examples]' --group benchmark
	@touch $@

$(STAMPS)/benchmark-$(CUDA): $(STAMPS)/benchmark
	@echo "installing $(CUDA) for jax"
	@$(INSTALL) 'jax[$(CUDA)]'
	@touch $@

$(CUDA_VENV)/.installed: $(PACKAGE) $(BASE)
	$(call INSTALLING,jaxbuf$(comma) flashbax and the compiler for $(CUDA) into $(CUDA_VENV))
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@$(CUDA_VENV)/bin/python $(PIP_INSTALL) \
	  --editable . --group benchmark
	@version=$$($(CUDA_VENV)/bin/python -c 'import jax; print(jax.__version__)'); \
	$(CUDA_VENV)/bin/python $(PIP_INSTALL) --no-deps \
	  jax-$(CUDA)-plugin==$$version jax-$(CUDA)-pjrt==$$version
	@touch $@

$(TORCH_VENV)/.installed: $(BASE)
	$(call INSTALLING,torchgfn$(comma) torchrl and torch (CPU) into $(TORCH_VENV),some minutes)
	@$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) \
	  --extra-index-url $(TORCH_INDEX) torch==2.13.0 'torchgfn>=2.4' \
	  pybind11 setuptools wheel
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) \
	  --no-build-isolation $(TORCHRL) && \
	$(TORCH_VENV)/bin/python -c 'import torch, torchrl._torchrl' || \
	  echo "torchrl does not run with this torch; its part of the benchmark is left out"
	@touch $@

WITHOUT_MPI := "To go on without MPI: make test MPI=0 (the MPI tests are then skipped)."
# mpi4jax builds a CUDA bridge as soon as it sees an nvcc, with or without the headers for it. It gets
# the CUDA that CUDA_PATH names, if its headers are there, else a folder that holds none.
CUDA_FOR_MPI = $(firstword $(foreach path,$(CUDA_PATH) $(CUDA_ROOT),$(if $(wildcard $(path)/include/cuda_runtime.h),$(path))) $(abspath $(STAMPS)))

# Nothing compiled here may come from pip's cache or go there: it is tied to one MPI by its path.
$(MPI_STAMP): pyproject.toml $(STAMPS)/test
	@[ -e $@ ] || $(RUN) -m pip uninstall --quiet --yes mpi4jax mpi4py mpich 2>/dev/null
	@rm -f $(STAMPS)/mpi*
ifdef MPICC
	@[ -x "$(MPI_COMPILER)" ] || { \
	  echo "MPICC=$(MPICC) is no command here. Unset it to use the MPI that pip installs." >&2; \
	  echo $(WITHOUT_MPI) >&2; exit 1; }
else
	$(call INSTALLING,MPI (mpich),a moment)
	@$(INSTALL) mpich || { echo $(WITHOUT_MPI) >&2; exit 1; }
endif
	@echo '#include <vector>' | $(MPI_COMPILER) -x c++ -fsyntax-only - || { \
	  echo "mpi4jax cannot be built: there is no working C++ compiler (on Debian and Ubuntu: apt install g++)." >&2; \
	  echo $(WITHOUT_MPI) >&2; exit 1; }
	@headers=$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	[ -e "$$headers/Python.h" ] || { \
	  echo "mpi4jax cannot be built: $$headers/Python.h is missing (on Debian and Ubuntu: apt install python3-dev)." >&2; \
	  echo $(WITHOUT_MPI) >&2; exit 1; }
	@echo "installing mpi4py and building mpi4jax with $(MPI_COMPILER) (takes $(if $(MPICC),some minutes,up to a minute))"
	@$(INSTALL) --group mpi-build && \
	MPICC=$(MPI_COMPILER) $(INSTALL) $(if $(MPICC),--no-cache-dir --no-binary mpi4py) mpi4py && \
	CUDA_PATH="$(CUDA_FOR_MPI)" MPI4JAX_BUILD_MPICC="$(MPI_COMPILER)" \
	  $(INSTALL) --no-build-isolation --no-cache-dir mpi4jax && \
	$(RUN) -c 'import mpi4jax' || { \
	  echo "mpi4jax was not built: the messages above say what it missed." >&2; \
	  echo $(WITHOUT_MPI) >&2; exit 1; }
	@touch $@
