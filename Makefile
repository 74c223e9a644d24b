# Everything a fresh machine needs is Python 3.11 and make. `make` alone prints the help.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
OLDEST := .oldest
OLDEST_STAMP := $(OLDEST)/.installed
OLDEST_TESTS := tests/draft tests/generation tests/options tests/reliability tests/models/test_folded_attention.py
OLDEST_TESTS += tests/test_compatibility.py tests/test_stats.py
INTEGRATIONS := .integrations
# Libraries that call generate() themselves, by the names of their tests, and the package of each. langchain-huggingface
# from 1.0 on needs a huggingface_hub below 2. The extra of smolagents brings a torchvision that needs torch for CUDA.
LIBRARIES := langchain_huggingface llama_index lm_eval outlines smolagents trl
TESTS_WITH := $(addprefix test-with-,$(LIBRARIES))
PACKAGE_langchain_huggingface := langchain-huggingface
PACKAGE_llama_index := llama-index-llms-huggingface
PACKAGE_lm_eval := lm_eval
PACKAGE_outlines := outlines
PACKAGE_smolagents := smolagents
PACKAGE_trl := trl
NEWEST := .newest
NEWEST_TORCH ?= torch
PLAIN := .plain
RELEASE := .release
RELEASE_PYTHONS ?= python3.11 python3.12 python3.13
# A tag, if given, must name the version, as v0.2.0 does.
TAG ?=
WORKERS ?= logical
# What `make test` leaves out: kernels in Triton's interpreter, and what users run beside generate().
KERNEL_TESTS := tests/kernels/test_triton_*.py tests/kernels/test_property.py
TOOL_TESTS := tests/tools tests/examples tests/test_pages.py tests/test_packaging.py tests/test_noise.py
PYTEST_ARGS ?=
DEMO_ARGS ?=
GPU_CHECK_ARGS ?=
RESULTS_PAGE := benchmarks/results_page.py

# One process a core: tiny models keep no second core busy. Beyond eight, loading torch takes longer than the tests.
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal

# A torch build that was asked for brings its own versions of what it needs: the pins are for ours.
ifeq ($(origin TORCH),file)
TORCH_PINS = -c $(1)/constraints.txt
endif

# Installs torch into the environment $(1), with the options $(2) of pip, and leaves there the pins of what comes beside it.
# torch for CUDA requires one version of Triton, so that ours holds beside torch for CPUs only.
define install_torch
(grep -v '^triton==' constraints.txt > $(1)/constraints.txt \
  && $(1)/bin/python -m pip install $(2) $(TORCH) $(TORCH_PINS) \
  && has_pin=$$($(1)/bin/python -c "from importlib.metadata import requires as r; print('triton==' in str(r('torch')))") \
  && if [ $$has_pin = True ]; then names="torch|triton"; else names=torch; fi \
  && grep -vE "^($$names)==" constraints.txt > $(1)/constraints.txt)
endef

.DEFAULT_GOAL := help
.PHONY: $(TESTS_WITH)
.PHONY: help install demo test test-kernels test-tools test-slow test-all test-plain test-oldest test-newest test-core test-integrations mutants results-check check fix kernels kernel-repo docs bench gpu-check distributions release-pythons wheel-check release-check clean

help:
	@echo "make demo        decode ten tasks with three methods and print what was measured"
	@echo "make test        tests of the library: decoding, drafting, verification, caches, models, reference kernels"
	@echo "make test-kernels tests of the Triton kernels in Triton's interpreter"
	@echo "make test-tools  tests of the command line, benchmarks, reports, data sets, Hub, examples, pages and packages"
	@echo "make test-slow   long tests of distributions, compilation and processes"
	@echo "make test-all    all of these"
	@echo "make test-plain  what the pages show, with only what pip install . brings"
	@echo "make mutants     small faults in the library, one by one: make test must find each"
	@echo "make test-oldest tests of what decodes and of what may fail, with the oldest supported transformers"
	@echo "make test-newest tests with the newest torch, huggingface_hub, Triton and transformers that setup.cfg allows"
	@echo "make test-core   tests of the core with a copy of the library that has no options"
	@echo "make test-integrations tests with TRL, LangChain and other libraries, in an environment for each"
	@echo "make results-check tables and pictures of the pages against the committed results"
	@echo "make check       ruff, mypy and the rules between the packages"
	@echo "make fix         let ruff format and repair"
	@echo "make kernels     compile every Triton kernel for GPUs that need not be there, and look for spills"
	@echo "make kernel-repo copy the kernels into build/torch-universal, as the Hugging Face kernels library loads them"
	@echo "make bench       every benchmark, two to three hours; JSON in benchmarks/results/, a page in benchmarks/RESULTS.md"
	@echo "make gpu-check   tests and measurements on a CUDA device, seven minutes at most; JSON in build/gpu"
	@echo "make docs        the documentation as pages, in build/docs; a warning is an error"
	@echo "make distributions the wheel and the source distribution in dist, as a package index accepts them"
	@echo "make wheel-check the wheel of dist in a fresh environment of each interpreter in RELEASE_PYTHONS"
	@echo "make release-check results-check, mutants, distributions and wheel-check"
	@echo "make install     create $(VENV) with what users need; make test and the other targets add what they need"
	@echo "make clean       remove $(VENV), caches and build output"
	@echo
	@echo "Variables:"
	@echo "  PYTHON=python3.12                              another interpreter, 3.11 or later"
	@echo '  TORCH="torch==2.13.0 --index-url <your index>" another torch build, given to pip as it stands;'
	@echo "                                                 run make clean first where $(VENV) exists"
	@echo '  NEWEST_TORCH="torch --extra-index-url <index>" the build of torch for make test-newest'
	@echo '  DEMO_ARGS="--prompts 16"                       arguments of examples/demo.py; --tiny needs no download'
	@echo '  GPU_CHECK_ARGS=--dry-run                       make gpu-check with tiny models on the CPU'
	@echo '  PYTEST_ARGS="-k greedy"                        arguments of pytest'
	@echo '  WORKERS=1                                      processes that run tests; unset: one a core, eight at most'
	@echo '  RELEASE_PYTHONS="python3.11 python3.13"        interpreters that make wheel-check tries'

install: $(STAMP)

# torch comes first and by its exact version: resolved as a range it may fetch gigabytes of another build.
$(STAMP): setup.cfg pyproject.toml constraints.txt hf_speculate/__init__.py
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 found; set PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(call install_torch,$(VENV))
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt setuptools
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt --no-build-isolation -e ".[demo]"
	@touch $@

# A test loads the kernel repository with kernels, which needs 16 more packages to check signatures, but none to load.
$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt --no-build-isolation -e ".[dev]"
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt --no-deps kernels
	@touch $@

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(DEV_STAMP)
	@echo "make test: the library, about 3 minutes on two cores; make test-all has the rest"
	$(PYTEST) -m "not slow" $(patsubst %,--ignore-glob=%,$(KERNEL_TESTS) $(TOOL_TESTS)) $(PYTEST_ARGS) tests

test-kernels: $(DEV_STAMP)
	@echo "make test-kernels: the Triton kernels in Triton's interpreter, about a minute on two cores"
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) $(KERNEL_TESTS)

test-tools: $(DEV_STAMP)
	@echo "make test-tools: command line, benchmarks, data sets, Hub, examples and pages, about a minute on two cores"
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) $(TOOL_TESTS)

test-slow: $(DEV_STAMP)
	@echo "make test-slow: long tests of distributions, compilation and processes, about 10 minutes on two cores"
	$(PYTEST) -m slow $(PYTEST_ARGS) tests

test-all: $(DEV_STAMP)
	@echo "make test-all: test, test-kernels, test-tools and test-slow in one run, about 15 minutes on two cores"
	$(PYTEST) $(PYTEST_ARGS) tests

test-core: $(DEV_STAMP)
	@echo "make test-core: tests of the core without hf_speculate/options, about 3 minutes on two cores"
	$(BIN)/python -m tests.core_alone -n $(WORKERS) $(PYTEST_ARGS)

results-check: $(DEV_STAMP)
	$(BIN)/python benchmarks/check_results.py

mutants: $(DEV_STAMP)
	@echo "make mutants: faults one by one, each against the tests that it names, about 7 minutes on one quiet core"
	$(BIN)/python -m tests.mutants --all-tests

# Made anew each time, as the pages say. torch by its exact version, as in $(VENV).
test-plain: $(DEV_STAMP)
	@echo "make test-plain: commands and code of the pages after pip install . alone, about 5 minutes on two cores"
	rm -rf $(PLAIN) build/lib
	"$(PYTHON)" -m venv $(PLAIN)
	$(call install_torch,$(PLAIN),--quiet)
	$(PLAIN)/bin/python -m pip install --quiet -c $(PLAIN)/constraints.txt .
	$(PYTEST) --environment $(PLAIN) $(PYTEST_ARGS) tests/plain_environment.py

# The same environment, with a few packages in front of its own.
$(OLDEST_STAMP): $(DEV_STAMP) constraints-oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --no-deps --target $(OLDEST) -r constraints-oldest.txt
	@touch $@

test-oldest: $(OLDEST_STAMP)
	PYTHONPATH=$(OLDEST) $(PYTEST) -m "not slow" $(PYTEST_ARGS) $(OLDEST_TESTS)

# A new environment in the folder $(1), which finds what it lacks in $(VENV).
define borrowing
	rm -rf $(1)
	"$(PYTHON)" -m venv $(1)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  | sed 's/.*/import site; site.addsitedir("&")/' \
	  > $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth
endef

# Made anew each time: the index may have newer versions than yesterday.
test-newest: $(DEV_STAMP)
	$(call borrowing,$(NEWEST))
	$(NEWEST)/bin/python -m pip install --quiet --upgrade $(NEWEST_TORCH) huggingface_hub \
	  'triton; platform_system == "Linux"' "$$(grep -o 'transformers>=[^ ]*' setup.cfg)"
	@$(NEWEST)/bin/python -m pip list | grep -E "^(huggingface_hub|torch|transformers|triton) "
	$(subst $(BIN),$(NEWEST)/bin,$(PYTEST)) -m "not slow or compiler" $(PYTEST_ARGS) tests

test-integrations: $(TESTS_WITH)

$(TESTS_WITH): test-with-%: $(DEV_STAMP)
	$(call borrowing,$(INTEGRATIONS)/$*)
	$(INTEGRATIONS)/$*/bin/python -m pip install --quiet -c $(VENV)/constraints.txt \
	  -c constraints-integrations.txt "$(PACKAGE_$*)"
	HF_HUB_OFFLINE=1 $(INTEGRATIONS)/$*/bin/python -m pytest -q $(PYTEST_ARGS) \
	  tests/examples/other_libraries.py -k $*

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/test_floors.py tests/test_core_and_options.py

fix: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: $(DEV_STAMP)
	$(BIN)/python benchmarks/kernel_builds.py

kernel-repo: $(STAMP)
	$(BIN)/python -m hf_speculate.tools.hub.kernel_repository

# Measures nothing, or needs a GPU, models that are fetched or two revisions to compare.
BY_HAND = benchmarks/check_results.py benchmarks/gpu.py benchmarks/real_models.py benchmarks/revisions.py benchmarks/row_memory.py
BY_HAND += benchmarks/beside_others.py benchmarks/grammar_drafts.py benchmarks/ten_tasks.py

bench: $(DEV_STAMP)
	@set -e; for file in $(filter-out $(RESULTS_PAGE) $(BY_HAND),$(wildcard benchmarks/*.py)) $(RESULTS_PAGE); do \
	  case $$file in */_*) continue;; esac; \
	  echo "== $$file"; HF_HUB_OFFLINE=1 $(BIN)/python $$file; done

# On a machine with a GPU and torch, transformers and Triton, nothing need be installed: CONTRIBUTING.md has the command.
gpu-check: $(DEV_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/gpu.py --out build/gpu $(GPU_CHECK_ARGS)

# Read anew each time (-E), so that a warning cannot hide behind an earlier build.
docs: $(DEV_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -W --keep-going -n -q -E -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

# Every interpreter is tried before minutes of other checks.
release-pythons:
	@for python in $(RELEASE_PYTHONS); do \
	  "$$python" -c "import ensurepip, venv" || { \
	    echo "$$python, of RELEASE_PYTHONS, does not run or makes no environments: install it, or name others, as in"; \
	    echo '  make release-check RELEASE_PYTHONS="python3.11 /path/to/python3.12"'; exit 1; }; \
	done

# twine has an environment of its own. setup.py reads REPOSITORY_URL.
distributions: $(DEV_STAMP)
	@version=$$($(BIN)/python -c "import hf_speculate; print(hf_speculate.__version__)"); \
	  test -z "$(TAG)" -o "$(TAG)" = "v$$version" || { echo "the tag $(TAG) must be v$$version, the version"; exit 1; }
	rm -rf dist build/lib $(RELEASE)/tools
	$(BIN)/python -m build --no-isolation --outdir dist
	"$(PYTHON)" -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet "twine>=6,<7"
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*

# Each interpreter gets torch and the wheel in an environment that goes before the next is made: torch with CUDA takes
# 6 GB. In the README's example, names of the Hub stand for the bundled models.
wheel-check: release-pythons
	@ls dist/*.whl > /dev/null 2>&1 || { echo "there is no wheel in dist; run make distributions first"; exit 1; }
	rm -rf $(RELEASE)/clone
	mkdir -p $(RELEASE)/clone && ln -s ../../examples ../../tests $(RELEASE)/clone/
	@set -e; for python in $(RELEASE_PYTHONS); do \
	  rm -rf $(RELEASE)/env; \
	  "$$python" -m venv $(RELEASE)/env; \
	  echo "== the wheel with $$($(RELEASE)/env/bin/python --version)"; \
	  $(call install_torch,$(RELEASE)/env,--quiet); \
	  $(RELEASE)/env/bin/python -m pip install --quiet -c $(RELEASE)/env/constraints.txt dist/*.whl; \
	  $(RELEASE)/env/bin/python -I tests/installed_wheel.py; \
	  (cd $(RELEASE)/clone && HF_HUB_OFFLINE=1 ../env/bin/python -m tests.page_code README.md); \
	  $(RELEASE)/env/bin/hf-speculate check examples/pair/target --draft examples/pair/draft; \
	done
	rm -rf $(RELEASE)/env

release-check: release-pythons results-check mutants distributions
	$(MAKE) wheel-check

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(INTEGRATIONS) $(PLAIN) $(RELEASE) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
