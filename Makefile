# `make demo` and `make test` set everything up by themselves; nothing is installed outside .venv (and .venv-peers)
PYTHON ?= python3
BIN := .venv/bin
# files side by side, in the order that tests/conftest.py gives them: the slow ones, which have few tests, come first
# where one of their processes crashes all end: with another in its place, pytest-xdist may wait for ever
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# many processes import the library: where this is set, each of them would compile it again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint format docs torture peers nginx browser plotly picture clean

demo: .venv/demo-installed
	$(BIN)/fedhm run digits

test: .venv/dev-installed
	$(PYTEST)

quick: .venv/dev-installed
	$(PYTEST) -m "not slow"

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the site, in site/
docs: .venv/dev-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# kills and damages real runs at random moments; make torture MINUTES=60 SEED=7 for more, and other ones;
# KILLS=20 goes on, if it must, until a server was killed so often
MINUTES ?= 5
SEED ?= 0
KILLS ?= 1
torture: .venv/dev-installed
	PYTHONPATH=tests $(BIN)/python -m torture --minutes $(MINUTES) --seed $(SEED) --kills $(KILLS)

# pfl-research and Flower, for benchmarks/engine.py only
peers: .venv-peers/installed

# the proxy of examples/flower-proxy is tested with Debian's nginx; it is only unpacked, so that no service is started
nginx: .nginx/usr/sbin/nginx

# the page of a report is tested in Debian's chromium, which has too many libraries to be unpacked as nginx is
browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium chromium-driver; }

# the page's plotting library, as it lies in the repository: the partial bundle that is called basic, from npm
PLOTLY := 4.1.1
plotly:
	cd $$(mktemp -d) && npm pack --silent plotly.js-basic-dist-min@$(PLOTLY) && tar xzf *.tgz \
	  && cp package/plotly-basic.min.js $(CURDIR)/src/fedhm/report/assets/ \
	  && cp package/LICENSE $(CURDIR)/src/fedhm/report/assets/plotly-LICENSE

# the README's picture of a page, in the browser
picture: .venv/dev-installed browser
	$(BIN)/fedhm run digits --out runs/picture
	$(BIN)/python tests/page_picture.py runs/picture/report.html docs/images/report-page.png

clean:
	rm -rf .venv .venv-peers .nginx runs site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedhm needs Python 3.11 or newer; name it with: make PYTHON=/path/to/python3.11 …"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/demo-installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing into .venv (some minutes the first time) …"
	$(INSTALL) --editable .
	@touch $@

.venv/dev-installed: .venv/demo-installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

.venv-peers/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement $<
	@touch $@

.nginx/usr/sbin/nginx:
	mkdir -p .nginx
	cd .nginx && { apt-get download --quiet nginx || { apt-get update --quiet && apt-get download --quiet nginx; }; }
	dpkg-deb --extract .nginx/nginx_*.deb .nginx
	@touch $@
