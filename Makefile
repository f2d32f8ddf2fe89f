# Two commands do everything on a fresh machine with Python: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt $(wildcard kernels/*.c kernels/*.h kernels/CMakeLists.txt offload/native/*.h) \
	$(wildcard offload/__init__.py offload/*/__init__.py)

# Where it is set, each process that tests start compiles all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test lint types bytecode simulator unit device test-device test-torch test-slow test-neon test-oracle test-faults test-trials test-gpu gpu test-peers recipes docs wheel fuzz bench-peers bench-peers-step clean

train: $(VENV)/installed
	$(BIN)/offload train $(ARGS)

# Types are checked on one core. Beside it pytest writes the tests' bytecode, which each of its workers would make else,
# and the simulated accelerator is compiled, for which `device` would wait with both of its workers.
test:
	$(MAKE) -j 2 lint types bytecode simulator
	$(MAKE) unit device

lint: $(VENV)/installed
	$(BIN)/ruff check offload tests bench docs
	$(BIN)/ruff format --check offload tests bench docs

types: $(VENV)/installed
	$(BIN)/mypy

bytecode: $(VENV)/installed
	$(BIN)/python -m pytest -qq --collect-only > /dev/null || true  # what is wrong with them `unit` says

simulator: $(VENV)/installed
	$(BIN)/python -c "from tests import simulated_device as one; one.compiler() and one.build()"

# In more processes than CI has cores: half of a test's time is spent waiting for disks, and for Pythons that start.
unit: $(VENV)/installed
	$(BIN)/python -m pytest -n 4 $(ARGS)

# On the simulated accelerator, which a process has from its beginning on, or not at all.
device: $(VENV)/installed
	OFFLOAD_TEST_DEVICE=simulated $(BIN)/python -m pytest -n 2 -m "device and not slow" tests/accelerator tests/gpu $(ARGS)

DEVICE_TESTS := tests/accelerator tests/gpu tests/parity tests/oracle tests/checkpoint/test_rng.py
test-device: $(VENV)/installed
	OFFLOAD_TEST_DEVICE=simulated $(BIN)/python -m pytest -n 2 -m "not peers and not oracle" $(DEVICE_TESTS) $(ARGS)

# With other versions of torch, each in an environment of its own, which is deleted afterwards: a build for CUDA is 5 GB.
# Writes a row of docs/development.md for each. PYTHON=python3.12 tests with that one.
VERSIONS ?= 2.11.0 2.12.1 2.14.1 2.15.0
test-torch: $(VENV)/installed
	$(BIN)/python -m tests.torch_versions $(VERSIONS) --python $(PYTHON) $(ARGS)

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow $(ARGS)

# The NEON kernels, cross-compiled and called in an emulator: Debian's gcc-aarch64-linux-gnu and qemu-user.
test-neon: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -k qemu tests/native $(ARGS)

# Each idiom of other people's training code in each placement, with fp32 and bf16 parameters, and on two ranks.
test-oracle: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "oracle or not oracle" tests/oracle tests/distributed/test_idioms.py $(ARGS)

test-faults: $(VENV)/installed
	$(BIN)/python -m pytest -m "slow or not slow" tests/faults $(ARGS)

# What promises the same bits, where each run on NVMe tries its steps in backward: some minutes. Optimizers of whole
# matrices refuse it, no share of states is on a device beside it, tests of trials decide themselves what is tried, and a
# few tests count writes and slots, damage one of two, or interrupt a kernel that a step that was tried does not run.
TRIED_TESTS := tests/parity tests/oracle tests/faults/test_training.py tests/faults/test_commits.py \
	tests/faults/test_interrupted_steps.py tests/faults/test_full_disk.py tests/faults/test_loss_scale.py
UNTRIED := --ignore=tests/parity/test_trials.py --ignore=tests/parity/test_whole_optimizers.py \
	--deselect=tests/parity/test_small_states.py::test_manifests_of_fp32_are_what_they_were_and_others_have_a_newer_version \
	--ignore=tests/parity/test_device_share.py \
	--deselect=tests/parity/test_late.py::test_the_version_of_a_manifest_tells_whether_chunks_owe_steps \
	--deselect=tests/faults/test_training.py::test_a_bit_that_flips_on_the_disk_is_found \
	--deselect=tests/faults/test_training.py::test_a_file_cut_short_under_a_run_is_found \
	--deselect=tests/faults/test_training.py::test_an_interrupt_inside_a_step_is_remembered \
	--deselect=tests/faults/test_commits.py::test_what_only_ram_has_goes_to_the_disk_at_commits_only \
	--deselect=tests/faults/test_commits.py::test_closing_raises_what_failed_behind_the_calls_and_commits_nothing
test-trials: $(VENV)/installed
	OFFLOAD_TEST_TRIALS=1 $(BIN)/python -m pytest -n 2 $(TRIED_TESTS) $(UNTRIED) $(ARGS)

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Coverage-guided, of what is parsed from a disk; ARGS="--seconds 300" altogether. Findings go to tests/attacks/found.
fuzz: $(VENV)/installed
	$(PIP) -e '.[fuzz]'
	$(BIN)/python -m tests.attacks.fuzz $(ARGS)

# Everything that needs a GPU, from this folder as it is: call it again until no case is left.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/gpu.py $(or $(OUT),out/gpu) --minutes $(or $(MINUTES),8) $(ARGS)

test-peers: $(VENV)/installed
	$(PIP) -e '.[peers]'
	$(BIN)/python -m pytest -m peers $(ARGS)
	OFFLOAD_TEST_DEVICE=simulated $(BIN)/python -m pytest -n 2 -m peers tests/peers/test_frameworks.py \
		tests/peers/test_framework_ranks.py tests/peers/test_resuming.py $(ARGS)

# Each recipe of docs/recipes beside plain torch, in an environment of its own that has one extra; some twenty minutes.
# ARGS="lora sft" runs these, ARGS="--write" writes the figures into the pages.
recipes: .venv-recipes/installed
	.venv-recipes/bin/python bench/recipes.py $(ARGS)

.venv-recipes/installed: $(SOURCES)
	test -x .venv-recipes/bin/python || $(PYTHON) -m venv .venv-recipes
	PIP_REQUIRE_VIRTUALENV=1 .venv-recipes/bin/pip --disable-pip-version-check install --quiet -c constraints.txt \
		-e '.[recipes]'
	@# Apart, so that transformers does not find torchvision. Of this one Python's part does without its operators, which
	@# are built for one torch each.
	PIP_REQUIRE_VIRTUALENV=1 .venv-recipes/bin/pip --disable-pip-version-check install --quiet --upgrade --no-deps \
		-c constraints.txt --target .venv-recipes/vision timm torchvision==0.16.2
	touch $@

# A wheel, and a training with it in an environment that has nothing else.
wheel: $(VENV)/installed
	rm -rf out/wheel
	$(BIN)/pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir out/wheel .
	$(PYTHON) -m venv out/wheel/env
	out/wheel/env/bin/pip --disable-pip-version-check install --quiet -c constraints.txt "$$(echo out/wheel/*.whl)[plots]"
	cd out/wheel && env/bin/offload doctor && env/bin/offload train --preset 1m --steps 5

# The pages of docs/, README and the results of benchmarks as a site, out/site/index.html. A broken link is an error.
docs: $(VENV)/installed
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# I/O beside DeepSpeed's, which lives in an environment of its own and compiles its extension at first use (minutes;
# needs a C++ compiler and libaio's headers, Debian's libaio-dev).
# Never outside it: if the folder goes away meanwhile, pip would take the Python behind it.
PEERS_PIP := PIP_REQUIRE_VIRTUALENV=1 .venv-peers/bin/pip --disable-pip-version-check install --quiet -c constraints.txt
bench-peers: $(VENV)/installed .venv-peers/installed
	PATH="$(CURDIR)/.venv-peers/bin:$$PATH" DS_ACCELERATOR=cpu \
		$(BIN)/python bench/io.py --deepspeed .venv-peers/bin/python $(or $(ARGS),.)

# Whole training steps beside DeepSpeed's; some ten minutes. ARGS="--params nvme --models 368m": with the parameters on
# NVMe, too.
bench-peers-step: $(VENV)/installed .venv-peers/installed
	$(BIN)/python bench/peers.py --deepspeed .venv-peers/bin/python $(ARGS)

.venv-peers/installed: constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	$(PEERS_PIP) torch setuptools wheel ninja xxhash
	DS_BUILD_OPS=0 $(PEERS_PIP) --no-build-isolation deepspeed
	touch $@

# Editable: the sources in use are the ones in this folder; only a change of the kernels or of the
# requirements installs again.
$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the rest into $(VENV), which takes some minutes where they have to be downloaded"
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-recipes build .mypy_cache .ruff_cache .pytest_cache .hypothesis scratch out
