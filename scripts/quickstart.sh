#!/usr/bin/env bash
# From nothing to a trained model: install, then GRPO from the committed warm start with FSDP2, vLLM and native weight sync.
#   bash scripts/quickstart.sh [flags of algos/grpo.py]        what is there already is skipped
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
began=$SECONDS
bash "$root/scripts/install.sh"
echo "installed after $((SECONDS - began)) s"
run="$root/runs/quickstart"
"$root/.venv/bin/python" "$root/algos/grpo.py" --run-dir "$run" --resume auto "$@"
echo "done after $((SECONDS - began)) s; open $run/report.html"
