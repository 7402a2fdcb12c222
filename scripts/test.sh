#!/usr/bin/env bash
# Install what is missing and run the tests: bash scripts/test.sh [arguments of pytest]
# Three workers: two cores compute while one waits, as launches of servers and ranks do. A module's tests share its runs,
# hence loadfile. No worker replaces one that has crashed: pytest ends soon, and names the test that it was in.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
code="algos baselines common docs scripts speedrun tests"  # a user's own files beside them are not ours to judge
# shellcheck disable=SC2086  # they are words
.venv/bin/ruff check $code
# shellcheck disable=SC2086
.venv/bin/ruff format --check $code
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
