# Everything a new user needs: `make demo` and `make test`. Both install into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint app results clean help

help:
	@echo "make demo   install, then answer questions about a picture at 30 % of its tokens"
	@echo "make test   install, then run the whole test suite"
	@echo "make app    install, then serve the web demo on the small models"
	@echo "make results  install, then measure everything in docs/results.md again (CPU, minutes)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove the virtual environment and outputs"

$(INSTALLED): pyproject.toml
	@echo "== making a virtual environment in $(VENV) and installing (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable ".[demo,test]"
	@touch $@
	@echo "== installed"

demo: $(INSTALLED)
	@echo "== demo: two small trained models, no download"
	@$(BIN)/raincheck-hf demo --out out

app: $(INSTALLED)
	@echo "== web demo: two small models, no download; open the address below"
	@$(BIN)/python demos/gradio_app.py

# What is measured already in $(ROWS) is not measured again.
ROWS := out/results

results: $(INSTALLED)
	@echo "== results: about 90 minutes of one core, shared by all cores; rows go to $(ROWS)"
	@$(BIN)/raincheck-hf bench quality --out $(ROWS)/quality.jsonl
	@$(BIN)/raincheck-hf bench sweep --out $(ROWS)/quality.jsonl
	@$(BIN)/raincheck-hf bench context --out $(ROWS)/quality.jsonl
	@$(BIN)/raincheck-hf bench state-map --out $(ROWS)/state_map.jsonl
	@$(BIN)/raincheck-hf bench memory --out $(ROWS)/memory.jsonl
	@$(BIN)/raincheck-hf bench gaps docs/data/intervals.txt --pending 25 50 100 1000 --out $(ROWS)/gaps.jsonl
	@$(BIN)/raincheck-hf plot $(ROWS)/*.jsonl --out $(ROWS)
	@$(BIN)/raincheck-hf bench tables $(ROWS)/*.jsonl > $(ROWS)/tables.md
	@echo "== tables: $(ROWS)/tables.md, pictures: $(ROWS)/*.png"

test: $(INSTALLED)
	@echo "== tests: oracles, threads, faults, stock features; two workers, about 10 minutes"
	@$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	@echo "== lint: ruff, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
