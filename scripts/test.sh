#!/usr/bin/env bash
# Install what is missing and run the tests: bash scripts/test.sh [arguments of pytest]
# Three workers: two cores compute while one waits, as launches of servers and ranks do. A module's tests share its runs,
# hence loadfile. No worker replaces one that has crashed: pytest ends soon, and names the test that it was in.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
