# make demo: the tiny ablation, end to end.  make test: the test-suite.  Both build .venv first.
# Settings of .venv, for example make demo PYTHON3=python3.13:
#   PYTHON3      the Python it is made with
#   TORCH_INDEX  where torch comes from, if not from PyPI, whose torch is for CUDA;
#                https://download.pytorch.org/whl/cpu has one without, 4 GB smaller
PYTHON3 ?= python3
TORCH_INDEX ?=
PYTHON := .venv/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --use-pep517
IMPORTS := import torch, megatron.core, deepspeed; \
    from quant_eval.libraries import pcre; pcre.stand_in(); import gptqmodel
FOLDERS := base train ckpt_tools quant_eval curvature study slurm docs tests check_machine.py
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test test-gpu gpu-bundle lint bench stress transformer-engine

venv: .venv/complete

# The stamp holds the TORCH_INDEX that .venv was built with: one built with another than is asked for is built anew.
ifneq ($(TORCH_INDEX),$(if $(TORCH_INDEX),$(shell cat .venv/complete 2>/dev/null)))
.PHONY: .venv/complete
endif

# pip unpacks below .venv: /tmp may be too small for the 3 GB of CUDA.
.venv/complete: export TMPDIR = $(CURDIR)/.venv/tmp
.venv/complete: requirements.lock requirements-cuda.lock
	@command -v "$(PYTHON3)" > /dev/null || \
	    { echo "error: no $(PYTHON3) on PATH; run apt-get install python3-venv" >&2; exit 2; }
	@"$(PYTHON3)" check_machine.py $(TORCH_INDEX)
	@echo "installing into .venv, with CUDA 3 GB to download: minutes"
	rm -f $@
	"$(PYTHON3)" -m venv --clear .venv
	mkdir .venv/tmp
	$(PIP) --constraint requirements.lock torch \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),--constraint requirements-cuda.lock)
	$(PIP) --no-deps -r requirements.lock
	@echo "importing what was installed"
	@$(PYTHON) -c '$(IMPORTS)' > .venv/import.log 2>&1 || \
	    { echo "error: $$(tail -n 1 .venv/import.log) (.venv/import.log); run make again" >&2; exit 2; }
	rm -r .venv/tmp
	echo $(TORCH_INDEX) > $@

demo: venv
	$(PYTHON) -m study run tiny

test: venv  # on two cores four workers: tests that wait for SLURM leave room
	$(PYTHON) -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

test-gpu: venv  # at most 15 minutes on one GPU; says so where there is none
	$(PYTHON) -m tests.gpu

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
	tests/other_cpus.sh runs/other_cpus

transformer-engine: venv  # says the minutes it takes, and what is missing, before it begins
	@$(PYTHON) -m install.transformer_engine
