#!/usr/bin/env bash
# Make .venv with the pinned requirements, for a GPU or a CPU machine, found by itself: bash scripts/install.sh
# uv installs them if it is on the PATH, pip otherwise. UV=/path/to/uv names another uv, and UV= (empty) means pip.
# When .venv already holds them it only asks torch for the GPUs. PYTHON=python3.12 picks the interpreter.
# MACHINE=gpu bash scripts/install.sh: for GPUs that this machine does not have, as in a docker build or on a login node.
# EXTRAS=trackers,reasoning-gym bash scripts/install.sh: more packages, pyproject.toml names the groups.
set -euo pipefail
cd "$(dirname "$0")/.."

machine=${MACHINE:-}
if [ -z "$machine" ]; then nvidia-smi -L > /dev/null 2>&1 && machine=gpu || machine=cpu; fi
case $machine in
  gpu) lock=requirements.txt needs="4 GB of downloads, 10 GB on disk" ;;
  cpu) lock=requirements-cpu.txt needs="1 GB of downloads, 4 GB on disk" ;;
  *) echo "error: MACHINE=$machine is neither gpu nor cpu" >&2; exit 2 ;;
esac
stamp=".venv/.installed-$machine-$(cat scripts/install.sh "$lock" pyproject.toml | cksum | tr ' ' -)"
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
if [ -e "$stamp" ] && [ -z "${EXTRAS:-}" ]; then check_driver; exit 0; fi

python=${PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
  [ -n "$python" ] || ! command -v "$candidate" > /dev/null || python=$candidate
done
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "error: Python 3.11, 3.12 or 3.13 is needed; PYTHON=... names it" >&2
  exit 2
}
uv=${UV-$(command -v uv || true)}
if [ -n "$uv" ]; then
  tool=uv
  make_venv() { "$uv" venv --quiet --seed --python "$python" .venv; }
  install() { "$uv" pip install --quiet --python .venv/bin/python "$@"; }
else
  tool=pip
  make_venv() { "$python" -m venv .venv; }
  install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
fi

if [ ! -e "$stamp" ]; then
  rm -f .venv/.installed-*  # what they name is about to be replaced
  echo "$tool is installing the $machine requirements into .venv ($("$python" --version)); a few minutes, $needs"
  [ -x .venv/bin/python ] || make_venv
  if [ "$machine" = cpu ]; then
    # torch's CPU build is not on PyPI. First try without PyTorch's index: it would be asked for all other packages, too.
    torch=$(mktemp)
    trap 'rm -f "$torch"' EXIT
    grep '^torch==' "$lock" > "$torch"
    install --no-deps -r "$torch" 2> /dev/null ||
      install --no-deps -r "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
  fi
  install --no-deps -r "$lock"  # the lock names every package, so nothing is left to resolve
  # On all cores. pip compiles on one, and uv leaves it to the first import, whose result may not be kept. Tests and most
  # model families, a quarter of the code, are left out: a process imports, and then compiles, one family.
  # Some packages ship files for other versions of Python.
  .venv/bin/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/(?!auto/)[^/]+/' .venv/lib || true
  install --no-deps --no-build-isolation --editable .  # `algos` and `common` from any working directory
  touch "$stamp"
fi
if [ -n "${EXTRAS:-}" ]; then
  # Not with the versions of the lock: trackers want older ones of pillow, protobuf and three others.
  install --editable ".[$EXTRAS]"
fi
check_driver
