# make demo | demo-video | test | test-families | test-cluster | test-cuda-sizes | test-installed | test-fast | nightly |
# faults | benchmarks-check | check | docs: each makes .venv first with what it needs, and makes it anew when the versions
# in it would change. demo needs ditile alone; the tests need the packages of developers too.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
VERSIONS := $(shell cat constraints.txt pyproject.toml | $(PYTHON) -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])")
BASE := $(VENV)/.base-$(VERSIONS)
VIDEO := $(VENV)/.video-$(VERSIONS)
STAMP := $(VENV)/.made-$(VERSIONS)
# Python compiles what it imports, which is a small part of what is installed: the demo needs no more.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
DEMO := ditile-demo.png
VIDEO_DEMO := ditile-demo-video.mp4

.PHONY: demo demo-video test test-families test-cluster test-cuda-sizes test-installed test-fast nightly faults \
  benchmarks-check check docs environment

demo: $(BASE)
	@echo "drawing a picture on two processes, in half a minute"
	$(RUN) -m ditile generate "a large red circle on the left on a gray background" \
	  --model shapes-flux --pipefusion 2 --patches 4 --out $(DEMO)
	@echo "the picture is $(CURDIR)/$(DEMO)"

demo-video: $(VIDEO)
	@echo "drawing a video on two processes, in half a minute"
	$(RUN) -m ditile generate "a large red circle moves from left to right on a gray background" \
	  --model shapes-wan --pipefusion 2 --patches 2 --out $(VIDEO_DEMO)
	@echo "the video is $(CURDIR)/$(VIDEO_DEMO)"

# Of rows that are marked `rotating` a commit runs a tenth, and those of changed classes: tests/rotation.py. ROWS=all runs all.
ROWS := commit
ROTATE := $(if $(filter all,$(ROWS)),,--rotate)

# All tests but those that another stage of .ci/run runs: the rules of the house are in `make check`, the zoo is in
# `make test-families`.
test: environment
	$(RUN) -m pytest -n 2 --dist worksteal $(ROTATE) --ignore tests/house --ignore tests/zoo \
	  -m 'not alone and not cluster and not installed and not sizes'
	$(RUN) -m pytest -n 2 --dist worksteal -m alone $$(grep -rl --include='test_*.py' mark.alone tests)

# Pipelines of diffusers, tiny, under every axis (tests/zoo).
test-families: environment
	$(RUN) -m pytest -n 2 --dist worksteal $(ROTATE) tests/zoo

# Replicas on a Ray cluster of two nodes on this machine, in some minutes.
test-cluster: environment
	$(RUN) -m pytest -m cluster tests/serve/test_ray.py

# A rank each of real models without weights, on simulated GPUs, in some minutes.
test-cuda-sizes: environment
	$(RUN) -m pytest -n 2 --dist worksteal -m sizes tests/planner/test_cuda_sizes.py \
	  tests/parallel/pipefusion/test_step_work.py

# The wheel in environments of its own, outside of the checkout: without extras, and with the server's.
test-installed: environment
	$(RUN) -m pytest -m 'installed and not nightly' tests/packaging

# Everything: what runs on every commit with all rows of the tables, a Ray cluster, real sizes, each extra by itself,
# faults put into the package (tests/mutants), and the faults of processes. Some hours.
nightly: environment
	$(MAKE) test ROWS=all
	$(MAKE) test-families ROWS=all
	$(MAKE) test-cluster
	$(MAKE) test-cuda-sizes
	$(MAKE) test-installed
	$(MAKE) benchmarks-check
	scripts/check
	$(RUN) -m pytest -m nightly tests/packaging
	$(RUN) -m tests.mutants
	$(MAKE) faults

# What to run while working: tests/fast.txt names them, a file or a test a line.
test-fast: environment
	tr '\n' '\0' < tests/fast.txt | xargs -0 $(RUN) -m pytest -n 3 --dist worksteal

# What happens to a run and to a server when something happens to one of its processes: docs/faults.md and a table of
# docs/serving.md, in some minutes.
faults: environment
	$(RUN) -m tests.distributed.faulty
	$(RUN) -m tests.serve.faulty

# What benchmarks/data say, and the commands that make them.
benchmarks-check: environment
	$(RUN) -m pytest -n 2 --dist loadfile benchmarks/tests

check: environment
	scripts/check

# The API reference, made from docstrings: build/docs/ditile.html
docs: environment
	$(INSTALL) -e '.[docs]'
	$(RUN) scripts/docs

environment: $(STAMP)

$(BASE):
	@echo "installing ditile into $(VENV): 0.3 GB besides torch, in a minute or two, and longer where packages are downloaded"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VIDEO): $(BASE)
	@echo "installing what writes videos into $(VENV), 0.1 GB"
	$(INSTALL) -e '.[video]'
	touch $@

$(STAMP): $(BASE)
	@echo "installing the packages of developers into $(VENV): 1.5 GB, in some minutes"
	$(INSTALL) -e '.[dev,plots,quantize]'
	@# Tests turn warnings into errors, and Python warns of other packages' code while it compiles it: so all of it is
	@# compiled now. A package may hold a file that is not Python of this version, as pip lets it too.
	$(RUN) -W ignore -m compileall -q -j 2 $(VENV)/lib > /dev/null || true
	touch $@
