"""Does a GPU do here what this repository relies on? Each check is a process with a limit.

    python scripts/gpu_check.py                      every check that this machine can run, a table, and a page of it
    python scripts/gpu_check.py --list               the checks, their bounds and what they need
    python scripts/gpu_check.py --only kernels runs  some of them

The checks engine, kernels and training run files of tests/ with pytest: real calls against references. The others look
at the machine, run scripts/selftest.py in several layouts, and measure the update. Checks that this machine cannot run
are listed with the reason: those with vLLM where it is not installed, those of several ranks with one GPU, and without
a GPU all but a few, which then run small on the CPU. The most important ones come first. Ends with exit code 1 and a
line that names what failed, and another for what was not reached in time (ten minutes, or sixteen with two GPUs).
--output FOLDER has gpu_check.json and README.md, to be committed in baselines/gpu.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import tyro
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from common import errors
from common.data import arithmetic
from common.preflight.machine import triton_lacks
from common.run import directory

ROOT = Path(__file__).parents[1]
CUDA = torch.cuda.is_available()
LARGE = CUDA and torch.cuda.get_device_properties(0).total_memory > 60e9
MINUTES, MINUTES_WITH_TWO_GPUS = 10.0, 16.0  # for all checks together
NEEDED_DRIVER, NEEDED_CAPABILITY = 580, (8, 0)  # the driver for CUDA 13
WITHOUT = "" if CUDA else "no GPU here: only the checks that need none are run, small on the CPU"
Finding = tuple[str, bool]  # (what was measured, whether it holds)

QWEN_05B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
    eos_token_id=1,
    pad_token_id=0,
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
SMALL = Qwen2Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, head_dim=64, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2)


@dataclasses.dataclass
class Args:
    list: bool = False  # Print the checks and leave.
    only: tuple[str, ...] = ()  # Names of checks. Default: all.
    output: str = "runs/gpu_check"  # Folder of the report.
    minutes: float = 0.0  # For all checks together. Default: 10, or 16 with two GPUs.
    models: str = ""  # Folder for models with random weights, about 2 GB. Default: a temporary one.
    here: bool = False  # Run them in this process, and print the findings as JSON: as the script does for each check.


def write_model(models: Path, config: PreTrainedConfig) -> str:
    """The folder, in this one, of a model with random weights of this shape and the embedded model's tokenizer."""
    folder = models / f"{config.model_type}-{config.hidden_size}"
    if not folder.exists():  # All checks use the same folder, so that vLLM compiles once.
        torch.manual_seed(0)
        with torch.device("cuda" if CUDA else "cpu"):  # a CPU takes half a minute for the random numbers
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")  # another check may be making it, too
        model.save_pretrained(unfinished)
        arithmetic.tokenizer().save_pretrained(unfinished)
        with contextlib.suppress(OSError):  # the other one was faster
            unfinished.rename(folder)
    return str(folder)


def files_of_two_packages() -> dict[str, bool]:
    """The installed files that two packages own, and whether they differ in the two."""
    owner, found = {}, {}
    for package in importlib.metadata.distributions():
        name = package.name  # reads the package's metadata, so once
        for line in (package.read_text("RECORD") or "").splitlines():
            file, hashed = line.split(",")[:2]
            if file.startswith("..") or "__pycache__" in file:
                continue
            first, as_first = owner.setdefault(file, (name, hashed))
            if first != name:
                found[file] = found.get(file, False) or hashed != as_first
    return found


def machine(models: Path) -> Iterator[Finding]:
    """Driver, capability, packages, and the compiler."""
    twice = [file for file, differs in files_of_two_packages().items() if differs]
    yield f"{len(twice)} files belong to two packages and differ {twice[:3] or ''}".strip(), not twice
    if not CUDA:
        return
    if not shutil.which("nvidia-smi"):
        yield "no nvidia-smi in PATH", False
        return
    smi = lambda query: subprocess.run(["nvidia-smi", *query], capture_output=True, text=True).stdout.strip()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # MiB, read before this process takes memory for a context of its own
    said = smi(["--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"])
    if re.fullmatch(r"\d+", said):
        used = int(said) / 1024
        yield f"{used:.1f} GiB of the first GPU are in use by others", used < 2
    else:  # a GPU that shares the host's memory prints [N/A]
        yield f'nvidia-smi doesn\'t say how much memory others use: "{said}"', True
    driver = smi(["--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0]
    new = torch.version.cuda.split(".")[0] != "13" or int(driver.split(".")[0]) >= NEEDED_DRIVER
    yield f"driver {driver} for CUDA {torch.version.cuda}", new
    yield f"capability {torch.cuda.get_device_capability()}", torch.cuda.get_device_capability() >= NEEDED_CAPABILITY
    locked = re.search(r"^cuda-bindings==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("vllm"):
        found = importlib.metadata.version("cuda-bindings")
        yield f"cuda-bindings {found}, locked {locked}", found == locked
    lacks = triton_lacks()
    yield f"for Triton: {lacks or 'a C compiler and Python.h'}", not lacks
    for library in ("vllm._C_stable_libtorch", "vllm.cumem_allocator") if importlib.util.find_spec("vllm") else ():
        try:
            importlib.import_module(library)
            yield f"{library} is imported", True
        except ImportError as error:
            yield f"{library}: {error}", False


class Findings:
    """A plugin of pytest: shows each test that ran as a finding, with what it measured (record_property)."""

    def __init__(self):
        self.out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)  # pytest keeps what tests print

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.passed and report.when != "call"):
            return
        words = [report.nodeid.rpartition("::")[2], *(str(value) for _, value in report.user_properties)]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            words.append(" ".join((crash.message if crash else report.longreprtext).split())[:300])
            words += [f"{crash.path}:{crash.lineno}"] if crash else []
        self.out.write("\n")  # behind pytest's dots
        show((": ".join(words), report.passed), self.out)


def show(finding: Finding, out=None) -> None:
    """Print a finding for the process that has started this one."""
    measured, holds = finding
    print("finding: " + json.dumps([measured, bool(holds)]), file=out, flush=True)


def tests(models: Path, *, files: tuple[str, ...]) -> Iterator[Finding]:
    """Files of tests/, in this process. Each test is shown as soon as it ends: a later one may hang."""
    os.environ["GPU_CHECK_MODELS"] = str(models)
    os.chdir(ROOT)
    code = pytest.main([*files, "-p", "no:cacheprovider"], plugins=[Findings()])
    yield f"pytest {' '.join(files)} ends with {int(code)}", code == 0


def lines_of(command: list, limit: float = 540) -> tuple[int, list[str]]:
    """(exit code, lines) of a command of this repository."""
    code, out, err = finish([sys.executable, *map(str, command)], limit)
    print(out + err, file=sys.stderr)  # for the log of the check
    return code, (out + err).splitlines()


def finish(command: list[str], limit: float) -> tuple[int | None, str, str]:
    """(exit code or None after the limit, output, errors) of a command. Nothing that it started outlives the limit, or
    this process if that is asked to end.
    """
    # Inherited by all that the command starts, also in sessions of their own; a check's own commands add to its mark.
    mark = os.environ.get("GPU_CHECK", "") + str(uuid.uuid4())
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GPU_CHECK": mark},
    )
    try:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        end_all(mark)
        out, err = process.communicate()
        return None, out, err
    except BaseException:  # Ctrl-C, or SIGTERM, which is SystemExit here
        end_all(mark)
        raise


def end_all(mark: str) -> None:
    """Kill every process with this mark, and those that they start meanwhile."""
    for _ in range(100):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes with this mark. One that has ended has no environment left, even if nobody has waited for it."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if f"GPU_CHECK={mark}".encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def selftest(
    models: Path, *, flags: tuple = (), ranks: int = 1, config: PreTrainedConfig = QWEN_05B
) -> Iterator[Finding]:
    """scripts/selftest.py: rollout, gap to the trainer, gradients, weight sync, checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(models, config)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if ranks > 1 else []
        code, said = lines_of([*launcher, "scripts/selftest.py", "--model", path, "--folder", folder, *flags])
    rows = [" ".join(line.split()) for line in said]
    rows = [row for row in rows if row.startswith(ROWS_OF_SELFTEST) or "error[" in row]
    yield " / ".join(rows[-12:]) or " ".join(said[-3:]), code == 0


def check_update(models: Path) -> Iterator[Finding]:
    """FLOP/s of the update of 1.5 B, as a share of one large product's, with and without compiled layers."""
    size, best = "qwen2.5-1.5b" if LARGE else "qwen2.5-0.5b", 0
    for kernels in ("eager", "compile"):  # one at a time: each has a model and its optimizer
        flags = ["--size", size, "--prompts", 32, "--dtype", "bfloat16", "--kernels", kernels]
        flags += ["--budgets", 4096, 16384]
        code, said = lines_of(["scripts/bench/update_mfu.py", *flags])
        rows = [line for line in said if line.startswith(f"| {kernels}")]
        best = max([best, *(int(row.rstrip("| ").rsplit("|", 1)[-1].strip(" %")) for row in rows)])
        # Columns: layers, freed memory, prompts, token budget, tokens, s, GFLOP/s, tokens/s, GiB, product, share.
        product = [line for line in said if line.startswith("matrix product")]
        yield f"{size}: " + " ".join(rows or said[-3:]) + " ".join(product), code == 0
    yield f"best {best} % of a large product", best >= 25


def check_runs(models: Path) -> Iterator[Finding]:
    """The embedded task: GRPO and a resume of it, PPO, PRIME. The last two without vLLM, whose start takes longest."""
    vllm = ["--rollout-backend", "vllm" if importlib.util.find_spec("vllm") else "hf"]
    hf = ["--rollout-backend", "hf"]
    common = ["--prompts-per-step", 16, "--mini-batches", 2, "--eval-prompts", 32]
    with tempfile.TemporaryDirectory() as folder:
        runs = {  # the name of the run's folder, the algorithm, and its own flags
            "grpo": ("grpo", ["--steps", 3, "--save-every", 2, *vllm]),
            "resumed": ("grpo", ["--steps", 4, "--resume", f"{folder}/grpo/checkpoints/step_000002", *vllm]),
            # In bfloat16 these two use the GPU's attention kernel. The embedded model alone would train in float32.
            "ppo": ("ppo", ["--steps", 1, "--dtype", "bfloat16", *hf]),
            "prime": ("prime", ["--gen-prompts", 16, "--steps", 1, "--dtype", "bfloat16", *hf]),
        }
        for name, (algorithm, flags) in runs.items():
            code, said = lines_of([f"algos/{algorithm}.py", *common, *flags, "--run-dir", f"{folder}/{name}"], 240)
            steps = [line for line in said if line.startswith("step") or "error[" in line]
            yield f"{name}: {steps[-1] if steps else ' '.join(said[-2:])}", code == 0


@dataclasses.dataclass(frozen=True)
class Check:
    run: Callable[[Path], Iterator[Finding]]  # The path is the folder of models.
    bound: str
    limit_s: float
    needs: tuple[str, ...] = ()  # "a GPU", "vLLM", "2 GPUs"


WITH_VLLM, TWO = ("a GPU", "vLLM"), ("2 GPUs", "vLLM")
ROWS_OF_SELFTEST = ("rollout", "log-probs", "gradient", "weight", "checkpoint", "Hugging Face")
ROWS, AS_ABOVE = "each row holds: rollout, gap, gradient, weight sync, checkpoint", "as self-test"
HF = ("--rollout-backend", "hf")
FLOAT32 = partial(selftest, flags=("--dtype", "float32"), config=SMALL)
ENGINE = partial(tests, files=("tests/gpu/test_engine.py",))
KERNELS = partial(tests, files=("tests/gpu/test_kernels.py",))
TRAINING = partial(tests, files=("tests/gpu/test_training.py", "tests/trainer/test_precision.py"))
SERVERS = ("--rollout-placement", "split", "--rollout-devices", "1")
CHECKS = {  # those first that decide whether the rest is worth its time
    "machine": Check(machine, f"driver >= {NEEDED_DRIVER}, capability >= 8.0, no file of two packages", 60),
    "engine": Check(ENGINE, "start <= 240 s, planned memory and cache, seeds repeat, drift <= 64 MiB", 300, WITH_VLLM),
    "self-test": Check(selftest, ROWS, 240, WITH_VLLM),
    "self-test-float32": Check(FLOAT32, f"{AS_ABOVE}, gap 1e-4", 240, WITH_VLLM),
    "kernels": Check(KERNELS, "relative errors of attention <= 1e-2, gradients <= 2e-2; log-probs 1e-5", 150),
    "training": Check(TRAINING, "one gradient in any way, float32 sums, memory as planned, a push, a checkpoint", 240),
    "self-test-hf": Check(partial(selftest, flags=HF, config=QWEN_05B if CUDA else SMALL), AS_ABOVE, 180),
    "self-test-lora": Check(partial(selftest, flags=(*HF, "--lora-rank", "8")), AS_ABOVE, 180, ("a GPU",)),
    "self-test-hf-float32": Check(partial(selftest, flags=(*HF, "--dtype", "float32"), config=SMALL), AS_ABOVE, 180),
    "self-test-hf-experts": Check(partial(selftest, flags=HF, config=EXPERTS), AS_ABOVE, 180, ("a GPU",)),
    "self-test-experts": Check(partial(selftest, config=EXPERTS), AS_ABOVE, 180, WITH_VLLM),
    "update": Check(check_update, ">= 25 % of a large product's FLOP/s", 180, ("a GPU",)),
    "runs": Check(check_runs, "grpo, a resume of it, ppo and prime end without an error", 300),
    "2-ranks": Check(partial(selftest, ranks=2), AS_ABOVE, 240, TWO),
    "rollout-tp-2": Check(partial(selftest, flags=("--rollout-tp", "2"), ranks=2), AS_ABOVE, 240, TWO),
    "sequence-parallel-2": Check(partial(selftest, flags=("--sequence-parallel", "2"), ranks=2), AS_ABOVE, 240, TWO),
    "shard-size-1": Check(partial(selftest, flags=("--shard-size", "1"), ranks=2), AS_ABOVE, 240, TWO),
    "split": Check(partial(selftest, flags=SERVERS), AS_ABOVE, 300, TWO),
}


def missing(check: Check) -> str:
    """What a check needs and this machine lacks, or ""."""
    there = {
        "a GPU": CUDA,
        "2 GPUs": torch.cuda.device_count() >= 2,
        "vLLM": importlib.util.find_spec("vllm") is not None,
    }
    return ", ".join(need for need in check.needs if not there[need])


def run_child(name: str, left: float, models: str, logs: Path) -> dict:
    """A check in a process of its own: its findings, seconds, and whether all hold. left: seconds for all checks.

    All that it prints is in logs/NAME.log.
    """
    limit, began = min(CHECKS[name].limit_s, left), time.perf_counter()
    code, out, err = finish([sys.executable, __file__, "--here", "--models", models, "--only", name], limit)
    (logs / f"{name}.log").write_text(out + err)
    findings = [json.loads(line[9:]) for line in out.splitlines() if line.startswith("finding: ")]
    ended = code == 0 and findings
    if code is None:
        cut = ", all that was left for this check" if limit == left else ""
        findings.append([f"no end within {limit:.0f} s{cut}", False])
    elif not ended:
        findings.append([" ".join((err or out).split("\n")[-4:]).strip()[-600:], False])
    passed = bool(ended) and all(holds for _, holds in findings)
    return {"findings": findings, "passed": passed, "seconds": round(time.perf_counter() - began, 1)}


def about() -> dict[str, str]:
    """The machine and versions that a report is worth nothing without."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "triton"):
        if importlib.util.find_spec(name):
            versions[name] = getattr(__import__(name), "__version__", "?") if name != "vllm" else "installed"
    # A copy of the repository without git can name its commit.
    commit = os.environ.get("GPU_CHECK_COMMIT") or directory.git("rev-parse", "--short", "HEAD")
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if CUDA else "no GPU"
    return {"device": device, "python": platform.python_version(), "commit": commit, **versions}


def main(args: Args) -> int:
    if unknown := [name for name in args.only if name not in CHECKS]:
        raise errors.BadInput(f"--only {unknown[0]}: the checks are {', '.join(CHECKS)}")
    if args.list:
        width = max(map(len, CHECKS))
        for name, check in CHECKS.items():
            needs = f"; needs {', '.join(check.needs)}" if check.needs else ""
            print(f"{name:<{width}}  {check.bound}; at most {check.limit_s:.0f} s{needs}")
        print(f"all together: at most {MINUTES:g} minutes, {MINUTES_WITH_TWO_GPUS:g} with two GPUs (--minutes)")
        print(WITHOUT, end="\n" * bool(WITHOUT))
        return 0
    if args.here:
        for name in args.only:
            for finding in CHECKS[name].run(Path(args.models)):
                show(finding)
        return 0
    print(WITHOUT, end="\n" * bool(WITHOUT))
    minutes = args.minutes or (MINUTES_WITH_TWO_GPUS if torch.cuda.device_count() >= 2 else MINUTES)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        models, deadline = str(Path(args.models or scratch).resolve()), time.monotonic() + 60 * minutes
        results = run_checks(args.only or tuple(CHECKS), models, deadline, output, args.only)
    failed = [name for name, found in results.items() if not found.get("passed", True)]
    missed = [name for name, found in results.items() if "not reached" in found]
    ending = [f"failed: {', '.join(failed)}"] * bool(failed)
    if missed:
        rest = shlex.join(["--only", *missed])
        ending.append(f"not reached in {minutes:g} minutes: {', '.join(missed)} ({rest} runs these, --minutes N all)")
    print(f"report: {write_report(output, args.only, results, ending)}")
    print("\n".join(ending), end="\n" * bool(ending))
    return int(bool(ending))


def run_checks(
    names: tuple[str, ...], models: str, deadline: float, output: Path, only: tuple[str, ...] = ()
) -> dict[str, dict]:
    """Check -> what was found, or why it was left out, or that it was not reached. deadline: of time.monotonic().

    The report is written after each check, because a machine may be taken away.
    """
    results = {}
    for name in names:
        lacks, left = missing(CHECKS[name]), deadline - time.monotonic()
        if lacks:
            results[name], said = {"left out": f"needs {lacks}"}, f"left out, needs {lacks}"
        elif left <= 0:
            results[name], said = {"not reached": "no time was left"}, "NOT REACHED"
        else:
            results[name] = found = run_child(name, left, models, output)
            said = f"{'passed' if found['passed'] else 'FAILED'}, {found['seconds']:.0f} s"
        print(f"{name}: {said}", flush=True)
        for measured, holds in results[name].get("findings", []):
            print(f"    {'' if holds else 'FAILED '}{measured}", flush=True)
        write_report(output, only, results, ["not all checks have run"])
    return results


def write_report(folder: Path, only: tuple[str, ...], results: dict[str, dict], ending: list[str]) -> Path:
    """gpu_check.json, and a page with the same, whose path is returned."""
    words = ["python", "scripts/gpu_check.py", *(["--only", *only] if only else [])]
    machine_words, command = about(), shlex.join(words)
    (folder / "gpu_check.json").write_text(
        json.dumps({"about": machine_words, "command": command, "checks": results}, indent=2) + "\n"
    )
    words = ", ".join(f"{name} {value}" for name, value in machine_words.items())
    page = [f"# {machine_words['device']}", "", f"`{command}`: {words}.", "", "| check | result | measured | s |"]
    page.append("|---|---|---|---|")
    for name, found in results.items():
        if "findings" not in found:
            page += [f"| {name} | {word}: {reason} | | |" for word, reason in found.items()]
            continue
        measured = "<br>".join(
            f"{'' if ok else '**failed** '}{text}".replace("|", "/") for text, ok in found["findings"]
        )
        page.append(f"| {name} | {'passed' if found['passed'] else '**failed**'} | {measured} | {found['seconds']} |")
    (folder / "README.md").write_text("\n".join([*page, "", *(ending or ["failed: none"]), ""]))
    return folder / "README.md"


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # finish() ends its command then
    parsed = tyro.cli(Args, description=__doc__)
    errors.launch(lambda args: sys.exit(main(args)), parsed)
