# Each target may be run again at any time. The work is in scripts/setup.sh, in `atoll` and in `cargo xtask`.

export PATH := $(PATH):$(HOME)/.cargo/bin
atoll = $${CARGO_TARGET_DIR:-target}/release/atoll

.PHONY: setup demo serve test soak bench

# Packages, pool, release build, guest kernel, templates, their default sizes baked.
setup:
	@scripts/setup.sh $(setup_arguments)
	@cargo build --release --package atoll
	@$(atoll) prepare

# A sandbox, from nothing: the CSV-to-chart job through the API.
demo: setup
	@$(atoll) demo

# Prints its address and, the first time, a key.
serve: setup
	@$(atoll) serve

test soak: setup_arguments = --for-tests

test: setup
	@cargo xtask test

# The long tests.
soak: setup
	@cargo xtask soak

bench: setup
	@cargo xtask bench
