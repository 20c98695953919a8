# make demo            set up .venv (first time only) and run the quickstart; ARGS are its arguments, such as ARGS=--json
# make test            all tests that need no GPU and no other engine
# make test-engines    bytes and results against the files of SGLang and vLLM; the adapters on both, vLLM in its own environment
# make gpu-test        the tests marked gpu, with the current python3 if its torch sees a GPU
# make gpu-sanitize    every kernel under compute-sanitizer: memcheck, racecheck, initcheck; minutes
# make lint            ruff and mypy
#
# VENV=DIR names another environment, PYTHON=python3.12 the interpreter it is made from, PIP_ARGS more options of pip.
# VENV= (empty) installs nothing and uses PYTHON as it is: make demo VENV= PYTHON=python3
.POSIX:

VENV = .venv
PYTHON =
PIP_ARGS =
ARGS =
WORKERS = 2

RUN = VENV='$(VENV)' PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' sh requirements/run.sh
# The adapters of engines: vLLM's on the real engine, SGLang's on the packages of two releases, which one process each holds.
VLLM_TESTS = tests/adapters/vllm
SGLANG_TESTS = tests/adapters/sglang
SGLANG_RELEASES = 0.5.17 0.5.23
# One thread a worker: small tensors, and the cores are taken by the workers.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest

demo:
	@$(RUN) examples/quickstart.py $(ARGS)

test:
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m 'not gpu and not engines' $(ARGS)

test-engines:
	@PM_OPS_PEERS=required $(PYTEST) -m 'engines and not gpu' --ignore=$(VLLM_TESTS) --ignore=$(SGLANG_TESTS) $(ARGS)
	@for release in $(SGLANG_RELEASES); do \
	    SGLANG_RELEASE=$$release PM_OPS_PEERS=required $(PYTEST) -m 'engines and not gpu' $(SGLANG_TESTS) $(ARGS) || exit 1; done
	@OMP_NUM_THREADS=1 $(RUN) --vllm -m pytest -n $(WORKERS) --dist loadfile -m engines $(VLLM_TESTS) $(ARGS)

gpu-test:
	@$(RUN) --cuda -m pytest -m gpu $(ARGS)

gpu-sanitize:
	@$(RUN) --cuda tests/kernels/sanitize.py $(ARGS)

lint:
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

.PHONY: demo test test-engines gpu-test gpu-sanitize lint
