.DEFAULT_GOAL := help
.PHONY: help venv demo test soak contract lint format build image image-try image-test clean

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
ENGINE ?= docker
IMAGE ?= rocm-dp
BASE_IMAGE ?=
BIN := $(VENV)/bin
# Not $(BIN)/pytest: of a tool that the image has already, the environment sees the module, not the command.
RUN := $(BIN)/python -m

# Else `import kernels` here finds our folder, not the package that other projects mean by it.
export PYTHONSAFEPATH := 1
# Ranks start by the hundred: each would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## say what can be made (the default)
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do printf '  make %-11s %s\n' "$$name" "$$what"; done
	@echo "  PYTHON=$(PYTHON)  VENV=$(VENV)  ARGS are passed on: make test ARGS='-k plan'"
	@echo "  ENGINE=$(ENGINE)  IMAGE=$(IMAGE)  BASE_IMAGE=$(or $(BASE_IMAGE),that of docker/Dockerfile)"

venv: ## set up the environment; a torch that PYTHON already has is used and never replaced
	@$(PYTHON) .ci/venv.py $(VENV)

demo: venv ## run the demo on this machine
	$(BIN)/rocm-dp demo $(ARGS)

# Two workers: the tests wait for ranks as often as they compute. A file stays in one, with the ranks that it started.
test: venv ## run the tests
	$(RUN) pytest -n 2 --dist loadfile $(ARGS)

contract: venv ## record what releases of SGLang promise: ARGS='WHEEL ...', oldest first
	$(BIN)/python tests/sglang_contract.py $(ARGS)

soak: venv ## run the soak's self-test: clean runs pass, every leak made on purpose is named
	$(BIN)/rocm-dp soak --self-test $(ARGS)

lint: venv ## ruff, mypy --strict and vermin
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy --strict
	$(BIN)/python -c 'import vermin; vermin.main()' --target=3.10- --no-tips --violations --quiet rocm_dp kernels tests .ci/venv.py docker/held.py

format: venv ## format the code and fix what ruff can fix
	$(RUN) ruff check --fix
	$(RUN) ruff format

build: venv ## wheel and sdist in dist/
	$(RUN) build

image: ## build the image with ENGINE (docker or podman)
	$(ENGINE) build --file docker/Dockerfile $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) --tag $(IMAGE) .

image-try: image ## run what needs no GPU in it: info, the doctor's look at its packages, a short demo, a soak
	$(ENGINE) run --rm --shm-size=2g $(IMAGE) info --ranks 2
	$(ENGINE) run --rm $(IMAGE) doctor --only 'cuda packages' --only triton --only init
	$(ENGINE) run --rm --shm-size=2g $(IMAGE) demo --ranks 2 --steps 10
	$(ENGINE) run --rm --shm-size=2g $(IMAGE) validate --ranks 2 --transport all_gather_v
	$(ENGINE) run --rm --shm-size=2g $(IMAGE) soak --ranks 2 --self-test --clean-runs 1

image-test: venv ## build the image on a stand-in base and run it, as root, with buildah and debootstrap alone
	$(RUN) pytest -m image tests/test_image.py $(ARGS)

clean: ## remove the environment, build output and caches
	@test ! -e $(VENV)/rocm-dp.json || rm -rf $(VENV)
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find rocm_dp kernels tests -name __pycache__ -prune -exec rm -rf {} +
