# Everything runs in .venv; `make demo` and `make test` set it up by themselves.
PYTHON ?= python3
GPU_PYTHON ?= 3.12
GPU_MORE ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# pip compiles to bytecode on one core, one package after the other, and their own tests too; this on all cores.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x 'site-packages/.*/tests/'

.PHONY: demo test lint types unit tables docs sizes gpu-bundle tools clean

demo: $(STAMP)
	$(BIN)/mosaic demo --output mosaic-demo

# mypy has one core, and the tests wait a tenth of their time: both together take less than one after the other.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m bench.prose
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

# mypy knows packages by their folders, so it reads a tree in which profiler/ stands where it is installed, beside the
# types that the extensions' own signatures show.
types: $(STAMP)
	rm -rf build/types && mkdir -p build/types/mosaic
	ln -s $(CURDIR)/mosaic/* build/types/mosaic/
	ln -s $(CURDIR)/profiler build/types/mosaic/profiler
	$(BIN)/stubgen --quiet --module mosaic._C --module mosaic._search --output build/types
	cd build/types && $(CURDIR)/$(BIN)/mypy --cache-dir ../mypy --config-file $(CURDIR)/pyproject.toml

# Whole files to each of three workers, since many tests wait for processes, in the order of their names: the long
# ones, under integration/, come first. Plain loops in processes of their own are at their best with threads that spin;
# here these would take another worker's core, and no test asks how fast they are. Some machines forbid bytecode, which
# hundreds of processes would then compile anew.
unit: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# The tables of README and docs/, and the plots of bench/README.md; no number is typed by hand.
tables: $(STAMP)
	$(BIN)/python -m bench.tables
	$(BIN)/python -m bench.plots

# README, docs/ and bench/README as pages with a reference of the API, in build/site. Pages link to each other and to pictures
# by their places in the repository, so they are copied with these places.
docs: $(STAMP)
	$(INSTALL) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	rm -rf build/pages && mkdir -p build/pages
	git ls-files -z README.md CHANGELOG.md LICENSE .github docs bench/README.md 'bench/results/*.png' 'bench/results/*.svg' csrc/README.md examples \
		| xargs -0 cp --parents -t build/pages
	$(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

# Lines of each part beside its budget.
sizes:
	@$(PYTHON) -m bench.sizes

# Wheels for a GPU machine without a network; needs pip alone.
gpu-bundle:
	$(PYTHON) -m bench.bundle --python $(GPU_PYTHON) $(GPU_MORE)

tools:
	@command -v $(PYTHON) >/dev/null || { echo "python3 is missing: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv python3-dev)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: Mosaic needs 3.11 or newer; run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; h = os.path.join(sysconfig.get_paths()["include"], "Python.h"); raise SystemExit(not os.path.exists(h))' || { echo "Python's headers are missing (Debian: apt-get install python3-dev)"; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ is missing (Debian: apt-get install g++)"; exit 1; }

$(STAMP): pyproject.toml setup.py constraints.txt $(SOURCES) | tools
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(COMPILE) $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy & \
	MOSAIC_WERROR=1 $(INSTALL) -e '.[dev]'; installed=$$?; wait; exit $$installed
	$(COMPILE) $(VENV)/lib mosaic profiler bench tests || true  # some files are no Python, or that of another version
	touch $@

clean:
	rm -rf $(VENV) build mosaic-demo *.egg-info
