# make demo | demo-video | test | check | nightly | docs | site | dist: each makes .venv first with what it needs, and makes it anew when
# the versions in it would change. demo needs ditile alone; the tests need the packages of developers too.
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

.PHONY: demo demo-video test nightly check docs site dist environment

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

# What tests/commit.txt names: each mechanism once. The rest of the tests runs in `make nightly`.
test: environment
	$(RUN) -m pytest -n 2 --dist worksteal --suite commit tests

# Everything, in parts of an hour at most. `make nightly PARTS="zoo cache"` runs these; without names, those that have not
# passed on this commit. The results are in nightly.txt.
nightly: environment
	$(INSTALL) -e '.[release]'
	$(RUN) -m tests.nightly $(PARTS)

# Format, lint, types, the rules of the house, and the wheel by itself.
check: environment
	scripts/check

# The API reference, made from docstrings: build/docs/ditile.html
docs: environment
	$(INSTALL) -e '.[docs]'
	$(RUN) scripts/docs

# The pages of docs/ with a search: build/site/index.html
site: environment
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	@echo "the pages are $(CURDIR)/build/site/index.html"

# A release: build/dist has the sdist, the wheel, and the list of what the wheel installs.
dist: environment
	$(INSTALL) -e '.[release]'
	scripts/dist

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
