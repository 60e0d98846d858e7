# make demo | demo-video | test | test-families | test-cluster | test-cuda-sizes | test-fast | faults | benchmarks-check | check | docs:
# each makes .venv first, and makes it anew when the versions in it would change.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.made-$(shell cat constraints.txt pyproject.toml | $(PYTHON) -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])")
DEMO := ditile-demo.png
VIDEO_DEMO := ditile-demo-video.mp4

.PHONY: demo demo-video test test-families test-cluster test-cuda-sizes test-fast faults benchmarks-check check docs environment

demo: environment
	$(RUN) -m ditile generate "a large red circle on the left on a gray background" \
	  --model shapes-flux --pipefusion 2 --patches 4 --out $(DEMO)
	@echo "the picture is $(CURDIR)/$(DEMO)"

demo-video: environment
	$(RUN) -m ditile generate "a large red circle moves from left to right on a gray background" \
	  --model shapes-wan --pipefusion 2 --patches 2 --out $(VIDEO_DEMO)
	@echo "the video is $(CURDIR)/$(VIDEO_DEMO)"

test: environment
	$(RUN) -m pytest -n 3 --dist worksteal -m 'not alone and not families and not cluster and not sizes'
	$(RUN) -m pytest -n 2 --dist worksteal -m alone $$(grep -rl --include='test_*.py' mark.alone tests)

# Every pipeline of diffusers, tiny, under every axis: tests/zoo.
test-families: environment
	$(RUN) -m pytest -n 2 --dist worksteal tests/zoo

# Replicas on a Ray cluster of two nodes on this machine, in some minutes.
test-cluster: environment
	$(RUN) -m pytest -m cluster tests/serve/test_ray.py

# A rank each of real models without weights, on simulated GPUs, in some minutes.
test-cuda-sizes: environment
	$(RUN) -m pytest -n 2 --dist worksteal -m sizes tests/planner/test_cuda_sizes.py

# What to run while working: tests/fast.txt names them, a file or a test a line.
test-fast: environment
	tr '\n' '\0' < tests/fast.txt | xargs -0 $(RUN) -m pytest -n 3 --dist worksteal

# What happens to a run and to a server when something happens to one of its processes: docs/faults.md and a table of
# docs/serving.md, in some minutes.
faults: environment
	$(RUN) -m tests.distributed.faulty
	$(RUN) -m tests.serve.faulty

# What docs/benchmarks say, and the commands that make them.
benchmarks-check: environment
	$(RUN) -m pytest benchmarks/tests

check: environment
	scripts/check

# The API reference, made from docstrings: build/docs/ditile.html
docs: environment
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(RUN) scripts/docs

environment: $(STAMP)

$(STAMP):
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots,quantize]'
	touch $@
