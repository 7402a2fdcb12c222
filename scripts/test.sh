#!/usr/bin/env bash
# Install what is missing and run the tests, one worker a core: bash scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
workers=$(nproc)
if [ "$workers" -gt 4 ]; then workers=4; fi
if nvidia-smi -L > /dev/null 2>&1; then workers=1; fi  # engines would not fit beside each other
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadscope "$@"
