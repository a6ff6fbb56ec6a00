.DEFAULT_GOAL := help
.PHONY: help demo test test-second test-beside lint types docs dist pythons wheel-test sweep gallery clean

# What is imported is compiled once, and not by every process of the tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(p)),$(p))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
# uv is three times as fast as pip. It reads no settings of pip's, so pip comes after it.
UV := UV_EXTRA_INDEX_URL="$(PIP_EXTRA_INDEX_URL)" UV_INDEX_STRATEGY=unsafe-best-match \
	$(BIN)/python -m uv pip install -q -c constraints.txt

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo  ## install, then fine-tune four experts, merge them seven ways, compare
	$(BIN)/python -m mergekit_lab +experiment=quickstart

# Three processes for two cores: a fifth of the time, a test waits for a program or for a clock.
test: .venv/dev  ## install what tests need, and run all of them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 10 \
		-m "not beside" --strict-skips

test-second: .venv/dev  ## run tests of merging by another Python: SECOND=python3.13
	$(BIN)/uv venv -q --clear --python $(SECOND) .venv/second
	$(UV) --python .venv/second/bin/python -e ".[demo]" pytest
	OMP_NUM_THREADS=1 .venv/second/bin/python -m pytest -q -p no:cacheprovider tests/merging/test_golden.py \
		tests/merging/test_limits.py tests/merging/test_registry.py tests/merging/test_layouts.py

test-beside: .venv/beside/ready  ## compare with mergekit and lm-eval, and sweep with Ray, in an environment that has them
	OMP_NUM_THREADS=1 .venv/beside/bin/python -m pytest -n 2 -m beside --durations 5 --strict-skips \
		tests/merging/test_against_mergekit.py tests/commands/test_recipe.py tests/runs/test_harness.py \
		tests/end_to_end/test_sweeps.py

lint: .venv/dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev  ## mypy
	$(BIN)/mypy

docs: .venv/dev  ## build the documentation's site into site/; a dead link or an undocumented public name fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/dev  ## build the source distribution and the wheel into dist/, and check what PyPI will show
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m twine check --strict dist/*

pythons: .venv/dev  ## find packages of every dependency, in the tested versions, for every Python that is supported
	for version in 3.11 3.12 3.13; do \
		$(BIN)/uv pip compile --quiet --python-version $$version --output-file /dev/null -c constraints.txt \
			--only-binary :all: --no-binary antlr4-python3-runtime \
			--extra demo --extra dev --extra docs pyproject.toml || exit 1; \
	done

wheel-test: .venv/dev  ## build the wheel, install it elsewhere, run it from another folder
	$(BIN)/python -m pytest -q tests/end_to_end/test_wheel.py

sweep: .venv/demo  ## 4 optimizers × 7 mergers on the quickstart's tasks: 16 experts, one comparison
	$(BIN)/python -m mergekit_lab -m +experiment=quickstart optimizer=adamw,sam,asam,mergopt \
		merger=average,task_arithmetic,ties,dare,fisher,tsvm,epimer

gallery: .venv/demo  ## draw docs/gallery.md anew: train twelve experts, run every analysis
	OMP_NUM_THREADS=1 $(BIN)/python experiments/gallery/make.py

clean:  ## remove the environment and what runs left here; the store stays
	rm -rf .venv outputs site dist

.venv/python:
	$(PYTHON) -m venv .venv
	$(PIP) uv
	touch $@

.venv/demo: .venv/python pyproject.toml constraints.txt
	$(UV) -e ".[demo]" || $(PIP) -e ".[demo]"
	touch $@

.venv/beside/ready: .venv/dev tests/beside.txt
	$(BIN)/python -m venv .venv/beside
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$(.venv/beside/bin/python -c "import site; print(site.getsitepackages()[0])")/shared.pth
	.venv/beside/bin/python -m pip install -q --no-deps -r tests/beside.txt
	touch $@

.venv/dev: .venv/python pyproject.toml constraints.txt
	$(UV) -e ".[demo,dev,docs]" || $(PIP) -e ".[demo,dev,docs]"
	touch $@
