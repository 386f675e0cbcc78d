# make course   set up, build the embedded world, run the notebooks at preset tiny
# make test     set up, run the test suite
# make lint     the linter
# make render   run the notebooks at preset tiny and keep their outputs in notebooks/
# make site     the course as a website in build/site
# make clean    remove everything built, the environment included

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE_READY := $(VENV)/.site-ready

.PHONY: course test lint render site clean
.DELETE_ON_ERROR:

course: $(READY)
	$(BIN)/python -m rlhf_course.offline.world
	$(BIN)/python scripts/run_notebooks.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

render: $(READY)
	$(BIN)/python scripts/run_notebooks.py --render

site: $(SITE_READY)
	$(BIN)/python site/build.py

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache *.egg-info

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(SITE_READY): site/requirements.txt $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r site/requirements.txt
	$(BIN)/pip check
	touch $@
