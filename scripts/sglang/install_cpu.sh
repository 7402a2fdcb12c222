#!/usr/bin/env bash
# Make a virtual environment with SGLang for a machine without a GPU: bash scripts/sglang/install_cpu.sh .sglang
# 1 GB of downloads, 3 GB on disk. On a machine with a GPU: python -m venv .sglang; .sglang/bin/pip install sglang==0.5.23
# SGLang's own CPU kernels need AMX and are compiled by hand. Stubs stand for them, and attention is plain torch's.
set -euo pipefail
folder=${1:?"a folder for the environment"}
here=$(cd "$(dirname "$0")" && pwd)
version=0.5.23
stamp=$folder/.installed-$(cat "$here/install_cpu.sh" "$here/requirements-cpu.txt" | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
"${PYTHON:-python3.11}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --no-deps torch==2.13.0+cpu 2> /dev/null ||
  pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
pip install --no-deps -r "$here/requirements-cpu.txt"
pip install --no-deps sglang==$version
site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
printf '%s\nimport no_torchvision\n' "$here/cpu_stubs" > "$site/sglang_cpu_stubs.pth"
touch "$stamp"
