#!/bin/sh
# The code of a commit with an environment of its own: sh benchmarks/older_code.sh COMMIT DIR
set -e
git worktree add --detach "$2" "$1"
make -C "$2" setup
