# make demo: the tiny ablation, end to end.  make test: the test-suite.  Both build .venv first.
# Settings of .venv, for example make demo PYTHON3=python3.12:
#   PYTHON3       the Python it is made with; otherwise the newest supported one that is found
#   TORCH_INDEX   where torch comes from, if not from PyPI, whose torch is for CUDA 13: https://download.pytorch.org/whl/cu126
#                 has one for CUDA 12, and .../whl/cpu one without CUDA, 4 GB smaller
#   SYSTEM_TORCH  1: take the torch that PYTHON3 has, that of a container say, and install everything else beside it
#   INSTALLER     uv or pip; otherwise uv, unless only pip is told where packages come from
PYTHON := .venv/bin/python
FOLDERS := base train ckpt_tools quant_eval curvature study dynamics slurm install docs tests
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test test-gpu test-gpus gpu-bundle lint bench stress transformer-engine

venv: .venv/complete

# The stamp holds the settings that .venv was built with. Where others are given it is built anew; where none are, as it was.
BUILT := $(shell cat .venv/complete 2> /dev/null)
ifeq ($(origin TORCH_INDEX)$(origin SYSTEM_TORCH),undefinedundefined)
SETTINGS := $(filter TORCH_INDEX=% SYSTEM_TORCH=%,$(BUILT))
else
SETTINGS := TORCH_INDEX=$(TORCH_INDEX) SYSTEM_TORCH=$(SYSTEM_TORCH)
endif
ifneq ($(origin PYTHON3),undefined)
SETTINGS += PYTHON=$(shell "$(PYTHON3)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
endif
ifneq ($(filter-out $(BUILT),$(SETTINGS)),)
.PHONY: .venv/complete
endif
# The torch of a container is that of its python3.
PYTHON3 ?= $(if $(findstring SYSTEM_TORCH=1,$(SETTINGS)),python3,$(shell install/find_python.sh))

.venv/complete: $(wildcard requirements*.lock)
	@command -v "$(PYTHON3)" > /dev/null || \
	    { echo "error: no $(PYTHON3) on PATH; run apt-get install python3-venv" >&2; exit 2; }
	@"$(PYTHON3)" -m install.make_venv $(SETTINGS) INSTALLER=$(INSTALLER)

demo: venv
	$(PYTHON) -m study run tiny

test: venv  # on two cores four workers: tests that wait for SLURM leave room
	$(PYTHON) -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

test-gpu: venv  # within 10 minutes on one GPU; says so where there is none. BASE=COMMIT times its steps, too
	$(PYTHON) -m tests.gpu $(if $(BASE),--base "$(BASE)")

N ?= 2
test-gpus: venv  # within 10 minutes on N GPUs of this machine: 2, 4 or 8
	$(PYTHON) -m tests.gpu --gpus $(N)

gpu-bundle: venv  # wheels for a GPU machine without network
	$(PYTHON) -m tests.gpu.bundle

lint: venv
	$(PYTHON) -m ruff format --check $(FOLDERS)
	$(PYTHON) -m ruff check $(FOLDERS)
	$(PYTHON) -m mypy

bench: venv
	$(PYTHON) -m tests.bench

stress: venv
	$(PYTHON) -m pytest -q -m stress -o faulthandler_timeout=14400
	@if tests/other_slurm.sh trixie; then tests/other_slurm.sh trixie \
	    $(PYTHON) -m pytest -q tests/slurm -m "stress or not stress" -o faulthandler_timeout=14400; \
	else echo "skipped: tests/slurm under SLURM 24.11"; [ "$$QUANTDYN_REQUIRE_SLURM" != 1 ]; fi
	tests/other_cpus.sh runs/other_cpus

transformer-engine: venv  # says the minutes it takes, and what is missing, before it begins
	@$(PYTHON) -m install.transformer_engine
