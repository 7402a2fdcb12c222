"""scripts/launch: two agents give what one with two ranks gives; what SLURM's and Kubernetes' variables become."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, free_port
from helpers import executable

from common import placement

FOLDER = ROOT / "scripts/launch"
SHELL = [FOLDER / "torchrun.sh", FOLDER / "slurm.sbatch"]
OURS = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "LOCAL_ADDR", "INTERFACE", "RDZV_ID", "PYTHON", "VIRTUAL_ENV")


def environment(**given: str) -> dict[str, str]:
    """This one without what another launch may have left in it."""
    inherited = {k: v for k, v in os.environ.items() if k not in (*placement.TORCHRUN_VARIABLES, *OURS)}
    return inherited | {"PYTHON": sys.executable} | given


@pytest.fixture
def recorder(tmp_path) -> Path:
    """Stands in for python: writes down its arguments and the variables that torchrun and NCCL would read."""
    return executable(
        tmp_path / "recorder",
        f"#!{sys.executable}\nimport json, os, sys\n"
        "if sys.argv[1] == '-c': print(3); sys.exit()  # GPUs\n"
        "names = ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME')\n"
        "out = {'argv': sys.argv[1:], 'env': {name: os.environ.get(name) for name in names}}\n"
        f"open(os.path.join({str(tmp_path)!r}, f'node{{os.environ.get(\"NODE_RANK\", 0)}}.json'), 'w')"
        ".write(json.dumps(out))\n",
    )


def recorded(tmp_path: Path, node: int = 0) -> tuple[dict[str, str], list[str], dict]:
    """(torchrun's flags, the script and its flags, environment) of a node."""
    found = json.loads((tmp_path / f"node{node}.json").read_text())
    module, rest = found["argv"][:2], found["argv"][2:]
    assert module == ["-m", "torch.distributed.run"]
    at = next(i for i, word in enumerate(rest) if word.startswith("algos/"))
    return dict(zip(rest[:at:2], rest[1:at:2])), rest[at:], found["env"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_the_shell_reads_it(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    "variables, named",
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK=2"),
    ],
)
def test_what_is_missing_is_named(recorder, variables, named):
    command = ["bash", FOLDER / "torchrun.sh", "algos/grpo.py"]
    settings = {"cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run(command, env=environment(PYTHON=str(recorder), **variables), **settings)
    assert result.returncode == 2 and named in result.stderr and result.stderr.count("\n") == 1
    for given, named in (([], "script"), (["grpo.py"], "grpo.py")):
        result = subprocess.run([*command[:2], *given], env=environment(), **settings)
        assert result.returncode == 2 and named in result.stderr


def test_one_node_needs_no_variables(recorder, tmp_path):
    command = ["bash", FOLDER / "torchrun.sh", "algos/grpo.py", "--run-dir", "with space"]
    subprocess.run(command, cwd=ROOT, env=environment(PYTHON=str(recorder)), check=True)
    flags, script, env = recorded(tmp_path)
    assert script == ["algos/grpo.py", "--run-dir", "with space"] and set(env.values()) == {None}
    assert (flags["--nnodes"], flags["--nproc-per-node"]) == ("1", "3") and "--local-addr" not in flags


def test_a_flag_of_the_script_is_none_of_torchruns(tmp_path):
    """--n could be short for --nnodes."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    command = ["bash", FOLDER / "torchrun.sh", script, "--n", "8"]
    variables = environment(PYTHON=sys.executable, NPROC_PER_NODE="1", MASTER_PORT=str(free_port()))
    said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    assert said.stdout == "['--n', '8']\n"


@pytest.fixture
def slurm(tmp_path):
    """srun and scontrol of a machine that plays two nodes, and the variables of a job on them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    executable(tools / "scontrol", '#!/bin/bash\n[ "$*" = "show hostnames gpu[7-8]" ] && printf "gpu7\\ngpu8\\n"\n')
    executable(
        tools / "srun",
        '#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] && [ "$SRUN_CPUS_PER_TASK" = 5 ] && shift || exit 9\n'
        'for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=gpu$((7 + node)) "$@" & pids+=($!); done\n'
        "for pid in ${pids[@]}; do wait $pid || exit 1; done\n",
    )
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[7-8]",
        "SLURM_CPUS_PER_TASK": "5",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PATH": f"{tools}:{os.environ['PATH']}",
    }


def test_slurm(slurm, recorder, tmp_path):
    command = ["bash", FOLDER / "slurm.sbatch", "algos/dapo.py", "--run-dir", "with space"]
    env = environment(PYTHON=str(recorder), INTERFACE="ib0", **slurm)
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    for node in range(2):
        flags, script, env = recorded(tmp_path, node)
        assert script == ["algos/dapo.py", "--run-dir", "with space"]
        assert flags == {
            "--nnodes": "2",
            "--nproc-per-node": "3",
            "--rdzv-backend": "c10d",
            "--rdzv-id": "4242",
            "--rdzv-endpoint": "gpu7:29742",
            "--local-addr": f"gpu{7 + node}",
            "--rdzv-conf": f"is_host={1 - node},read_timeout=900,join_timeout=900",
            "--shutdown-timeout": "300",
        }
        assert set(env.values()) == {"ib0"}
    directives = re.findall(r"^#SBATCH --(\S+?)=", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"} <= set(directives)
    one = "#SBATCH --ntasks-per-node=1\n"
    head, _, body = (FOLDER / "slurm.sbatch").read_text().partition("set -euo")
    assert one in head and "#SBATCH" not in body, "sbatch reads no directive behind the first command"
    assert int(re.search(r"--signal=TERM@(\d+)", head)[1]) > int(flags["--shutdown-timeout"])  # else the step is lost


def test_a_slurm_job_fails_where_a_node_does(slurm, tmp_path):
    broken = executable(tmp_path / "broken", '#!/bin/bash\n[ "$1" = -c ] && echo 1 && exit\nexit $NODE_RANK\n')
    command = ["bash", FOLDER / "slurm.sbatch", "algos/grpo.py"]
    assert subprocess.run(command, env=environment(PYTHON=str(broken), **slurm)).returncode == 1


def test_kubernetes(recorder, tmp_path):
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = service["metadata"]["name"]
    assert (service["kind"], service["apiVersion"], job["kind"], job["apiVersion"]) == (
        "Service",
        "v1",
        "Job",
        "batch/v1",
    )
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["subdomain"] == name  # else pods have no names
    assert pod["terminationGracePeriodSeconds"] > 300  # torchrun.sh gives the ranks 300 to save their step
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert all(isinstance(value, str) for value in [*given.values(), *container["args"]]), "quote numbers"
    assert int(given["NNODES"]) == spec["completions"] == spec["parallelism"]
    assert int(given["NPROC_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{name}"
    for index in range(2):
        of_pod = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{job['metadata']['name']}-{index}"}
        env = environment(PYTHON=str(recorder), **given, **of_pod)
        subprocess.run([*container["command"], *container["args"]], cwd=ROOT, env=env, check=True)
        flags, script, _ = recorded(tmp_path, index)
        assert script == container["args"] and (ROOT / script[0]).is_file()
        assert flags["--rdzv-endpoint"] == "onefile-rl-0.onefile-rl:29500"
        assert flags["--local-addr"] == f"onefile-rl-{index}.onefile-rl" and flags["--nproc-per-node"] == "8"
        assert flags["--rdzv-conf"].startswith(f"is_host={1 - index},") and flags["--nnodes"] == "2"


def test_kubernetes_flags_parse():
    import tyro

    from algos import grpo

    _, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    args = tyro.cli(grpo.Args, args=job["spec"]["template"]["spec"]["containers"][0]["args"][1:])
    assert args.saving.resume == "auto" and args.run_dir.startswith("/runs/")
