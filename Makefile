# make course   set up, build the synthetic world, run the notebooks at preset tiny
# make hello    set up, watch a small policy learn within a minute; writes build/hello.html
# make test     set up, run the test suite without whole notebooks
# make test-all   run every test: also the slow ones, and the notebooks as tests
# make test-notebooks   run the notebooks as tests: no network, no warnings, limited memory; some also on the simulated GPU
# make real     download and convert a real chat model, SmolLM2-135M-Instruct, to build/models; this takes 540 MB
# make quick    run the linter and the tests that take seconds: formulas, fixtures, options, pages
# make engines  install verl's arithmetic in build/engines, for scripts/hand_over.py --check; this takes 400 MB
# make mutants  show which mistakes in the algorithm the tests notice; this takes an hour
# make lint     run the linters of code, English and spelling
# make render   run the notebooks at preset tiny; keep their outputs in notebooks/, their run cards in figs/measured/
# make figs     draw the figures in figs/ from their sources and the run cards
# make exercises   write the exercise notebooks from their sources
# make handout  write the exercises for a class, without solutions, to build/handout and build/handout.zip
# make slides   make the slides in slides/, English and Chinese, from slides.md with Marp; needs npm and Chromium
# make site     build the course as a website in build/site; needs npm
# make po       update the translations in locale/ after a change of the English text
# make zh       write README.zh.md, figs/zh and the Chinese notebooks in build/zh; make zh-release also requires a complete translation
# make models   train the models in models/ again and measure them: make models IMDB=FOLDER; this takes hours
# make clean    remove everything built, including the environment; keep your answers in build/answers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE_READY := $(VENV)/.site-ready
VERL := build/engines/verl-0.9.1
MARP_VERSION := 4.5.1
MARP := build/marp-$(MARP_VERSION)

.PHONY: course hello real test test-all test-notebooks quick engines mutants lint render figs exercises handout slides site po zh zh-release models clean
.DELETE_ON_ERROR:

course: $(READY)
	$(BIN)/python dev/build_world.py
	$(BIN)/python scripts/run_notebooks.py

hello: $(READY)
	$(BIN)/python scripts/hello.py

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20

test: $(SITE_READY)
	$(PYTEST) -m "not notebook and not slow"

test-all: $(SITE_READY)
	$(PYTEST)

test-notebooks: $(READY)
	$(PYTEST) -m notebook

real: $(READY)
	$(BIN)/python scripts/get_real_model.py

quick: $(READY)
	.ci/quick $(BIN)/python

engines: $(VERL)

mutants: $(READY)
	$(BIN)/python dev/mutants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python dev/lint_english.py
	$(BIN)/python -m codespell_lib

render: $(READY)
	$(BIN)/python scripts/run_notebooks.py --render

figs: $(READY)
	$(BIN)/python dev/figures/draw.py

exercises: $(READY)
	$(BIN)/python dev/exercises/make_exercises.py

handout: $(READY)
	$(BIN)/python dev/exercises/make_handout.py

slides: $(MARP) $(SITE_READY)
	$(BIN)/python dev/build_slides.py --marp $(MARP)/node_modules/.bin/marp

site: $(SITE_READY)
	$(BIN)/python docs/_ext/build.py

po: $(SITE_READY)
	$(BIN)/python docs/_ext/translate.py po

zh: $(SITE_READY)
	$(BIN)/python docs/_ext/translate.py write

zh-release: zh
	$(BIN)/python docs/_ext/translate.py check
	$(BIN)/python docs/_ext/translate.py release

models: $(READY)
	@test -n "$(IMDB)" || { echo "Run make models IMDB=FOLDER; FOLDER contains IMDB in the hub's layout." >&2; exit 1; }
	$(BIN)/python dev/models/train_imdb_models.py $(IMDB)
	$(BIN)/python dev/models/measure_imdb_models.py $(IMDB)
	$(BIN)/python dev/models/train_baichuan_mini.py
	$(BIN)/python dev/models/train_chat_mini.py
	rm -f models/imdb-live-policies/*/run.json
	$(BIN)/python dev/models/train_live_policies.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache *.egg-info
	test ! -d build || find build -mindepth 1 -maxdepth 1 ! -name answers -exec rm -rf {} +

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch, transformers, Jupyter and the rest of requirements.txt into $(VENV). This happens once and takes some minutes."
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(SITE_READY): docs/requirements.txt $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r docs/requirements.txt
	$(BIN)/pip check
	touch $@

# We install verl outside the environment and without dependencies: verl needs another version of transformers, and the check needs no GPU parts.
$(VERL): rlhf_course/command_line/engines/verl-requirements.txt $(READY)
	rm -rf $@ $@.part
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.part -r $<
	mv $@.part $@
	touch $@

$(MARP):
	@command -v npm >/dev/null || { echo "make slides needs npm: install Debian's packages nodejs and npm." >&2; exit 1; }
	rm -rf $@.part
	npm install --prefix $@.part --no-audit --no-fund --loglevel error @marp-team/marp-cli@$(MARP_VERSION)
	mv $@.part $@
