# make demo: the tiny ablation, end to end.  make test: the test-suite.  Both build .venv first.
PYTHON := .venv/bin/python
FOLDERS := train ckpt_tools quant_eval curvature study slurm tests
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test lint bench stress

venv: .venv/complete

.venv/complete: requirements.lock
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; put it first on PATH as python3"; exit 2; }
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	touch $@

demo: venv
	$(PYTHON) -m study run tiny

test: venv
	$(PYTHON) -m pytest -q -n 2 --dist loadfile

lint: venv
	$(PYTHON) -m ruff format --check $(FOLDERS)
	$(PYTHON) -m ruff check $(FOLDERS)
	$(PYTHON) -m mypy

bench: venv
	$(PYTHON) -m tests.bench

stress: venv
	$(PYTHON) -m pytest -q -m stress
