"""vLLM's server in a process that does not outlive the one that started it.

python -m common.server_main CORES ARGUMENTS OF vLLM'S SERVER    (CORES: 0,1 or - for all; common/servers.py runs this)

The starter holds this process's standard input. It closes with the starter, however that one ends, and then the whole
process group is killed: the engine is a process of its own and would keep its memory.
"""

import os
import runpy
import signal
import sys
import threading


def end_with_starter() -> None:
    os.read(0, 1)  # not sys.stdin: its lock may be asked for while Python ends
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    cores = sys.argv.pop(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    threading.Thread(target=end_with_starter, daemon=True).start()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
