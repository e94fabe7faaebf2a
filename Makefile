.DEFAULT_GOAL := help
.PHONY: help venv demo test soak contract lint format build clean

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
# Not $(BIN)/pytest: of a tool that the image has already, the environment sees the module, not the command.
RUN := $(BIN)/python -m

# Else `import kernels` here finds our folder, not the package that other projects mean by it.
export PYTHONSAFEPATH := 1

help: ## say what can be made (the default)
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do printf '  make %-8s %s\n' "$$name" "$$what"; done
	@echo "  PYTHON=$(PYTHON)  VENV=$(VENV)  ARGS are passed on: make test ARGS='-k plan'"

venv: ## set up the environment; a torch that PYTHON already has is used and never replaced
	@$(PYTHON) .ci/venv.py $(VENV)

demo: venv ## run the demo on this machine
	$(BIN)/rocm-dp demo $(ARGS)

test: venv ## run the tests
	$(RUN) pytest $(ARGS)

contract: venv ## record what releases of SGLang promise: ARGS='WHEEL ...', oldest first
	$(BIN)/python tests/sglang_contract.py $(ARGS)

soak: venv ## run the soak's self-test: clean runs pass, every leak made on purpose is named
	$(BIN)/rocm-dp soak --self-test $(ARGS)

lint: venv ## ruff, mypy --strict and vermin
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy --strict
	$(BIN)/python -c 'import vermin; vermin.main()' --target=3.10- --no-tips --violations --quiet rocm_dp kernels tests .ci/venv.py

format: venv ## format the code and fix what ruff can fix
	$(RUN) ruff check --fix
	$(RUN) ruff format

build: venv ## wheel and sdist in dist/
	$(RUN) build

clean: ## remove the environment, build output and caches
	@test ! -e $(VENV)/rocm-dp.json || rm -rf $(VENV)
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find rocm_dp kernels tests -name __pycache__ -prune -exec rm -rf {} +
