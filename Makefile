# make test    run the tests                  make train   train a small GPT on the standard library
# make check   lint, format, types, words     make bench   measure all bars, write benchmarks/RESULTS.md
# make fault   two replicas train, one is killed, restarts, and is healed
# make docs    the site, in out/docs: trains the loss curves, and renders the API from docstrings
# make lists   regenerate every list of algorithms: exports, optimizer objects, tables
# make test-full   includes slow tests, which repeat for every algorithm what others test for its family
# make notebooks   execute notebooks/ and store them with their pictures
# make compare   optimizers on small tasks, with equal budgets: writes benchmarks/COMPARISON.md; resumes if interrupted
# make gradient-free   train a digits classifier without backward passes, and draw the search of CMA-ES
# make memory   compare storage formats of weights and slots in bytes and in loss: figures of docs/memory.md
# make mutants   put deliberate faults into the package: prints those that no test catches; ARGS="core" selects some
# make lines   count lines of code without docstrings, comments and blank lines, by folder
# make gpu     check a GPU: one page of results, and a file to send; ARGS="--device cpu" is a dry run
# make wheel   dist/: a wheel for every machine, and one for this platform with compiled kernels
# make clean   remove the virtual environment and built files; ARGS="…" is passed to the command of a target
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=

.PHONY: train gradient-free fault notebooks docs lists test test-full check bench compare memory lines \
	gpu wheel clean mutants

train: $(VENV)/.examples
	$(BIN)/python examples/train_gpt.py $(ARGS)

fault: $(VENV)/.torchft
	$(BIN)/python examples/fault_tolerant.py $(ARGS)

gradient-free: $(VENV)/.examples
	$(BIN)/python examples/gradient_free.py $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . out/docs $(ARGS)

lists: $(VENV)/.docs
	$(BIN)/python docs/lists.py $(ARGS)

notebooks: $(VENV)/.notebooks
	$(BIN)/python notebooks/run.py $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
		--no-loadscope-reorder $(ARGS)

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
		--no-loadscope-reorder -m "full or not full" $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/words.py
	rm -rf build/typed
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typed .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.peers
	$(BIN)/python benchmarks/run.py $(ARGS)

compare: $(VENV)/.bench
	$(BIN)/python benchmarks/compare.py $(ARGS)

memory: $(VENV)/.bench
	$(BIN)/python benchmarks/memory.py $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants/run.py $(ARGS)

# with any Python: it imports nothing of ours
lines:
	$(PYTHON) benchmarks/lines.py $(ARGS)

wheel: $(VENV)/.release
	$(BIN)/python release/wheel.py --out dist $(ARGS)

# with the torch that is installed: one for CUDA, where a card is to be checked
gpu:
	PYTHONPATH=benchmarks:tests/support $(PYTHON) -m gpu_check $(ARGS)

# torch comes first and through the constraints: unpinned, it would bring gigabytes of CUDA along
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	touch $@

$(VENV)/.examples: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[examples]"
	touch $@

$(VENV)/.notebooks: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	touch $@ $(VENV)/.examples

$(VENV)/.torchft: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[examples,torchft]"
	touch $@ $(VENV)/.examples

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(VENV)/.release: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[release]"
	touch $@

$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[bench]"
	touch $@

# the other libraries one by one: what does not install here is named in the results, no more
$(VENV)/.peers: $(VENV)/.bench
	for peer in $$($(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['peers'])"); do \
		$(BIN)/pip install --quiet --constraint constraints.txt "$$peer" || echo "without $$peer"; \
	done
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ $(VENV)/.examples $(VENV)/.notebooks $(VENV)/.docs $(VENV)/.release

clean:
	rm -rf $(VENV) build dist *.egg-info out
