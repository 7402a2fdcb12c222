"""The trackers of --track, which mirror metrics.jsonl. A package is imported when its tracker is chosen.

Each tracker writes into the run directory and needs no network, unless its own environment variables say otherwise.
The functions open_NAME return an Opened. A resumed run goes on with the tracker's run that it had before: its name for
it is kept in RUN/tracker.json.

accelerate.tracking has the same five. It needs accelerate's PartialState, which takes over the process: devices,
variables of torchrun, numbers of threads. TensorBoard's class refuses our flags, because some are tuples. Folders,
offline modes and exceptions would still be ours, and with them most of this file.
"""

import json
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.data.json_lines import read_object
from common.errors import BadInput, warn
from common.preflight import folders
from common.preflight.machine import wandb_mode

PROJECT = "onefile-rl"  # name of the project, or of the experiment, in each tracker
KEPT_ID = "tracker.json"  # file in the run directory: {tracker: the id of its run}
# Variables that a package reads when it is imported: no reports to its makers, and no files in the home directory.
VARIABLES = {
    "wandb": {"WANDB_ERROR_REPORTING": "false", "WANDB_CACHE_DIR": "{run_dir}/wandb/cache"},
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "trackio": {"TRACKIO_DIR": "{run_dir}/trackio"},
}
ERRORS = {  # tracker -> what it raises in addition to OSError, RuntimeError and ValueError
    "wandb": "wandb.errors:Error",
    "mlflow": "mlflow.exceptions:MlflowException",
    "swanlab": "swanlab.exceptions:AuthenticationError",
}


@dataclass(frozen=True)
class Opened:
    """A tracker's run."""

    log: Callable[..., None]  # log(metrics, step=step) adds a step
    finish: Callable[[], None]  # ends the run
    id: str = ""  # with which a resumed run finds it again; "" if the folder is enough


@dataclass(frozen=True)
class Resumed:
    """What a resumed run goes on with."""

    start: int = 0  # number of steps that are done; 0 for a fresh run
    id: str = ""  # of the tracker's run; "" makes another one


class Sink:
    """Sends metrics to --track. Rank 0 has one.

    A tracker that fails after it was opened does not end the run: its first failure is a warning, and metrics.jsonl has
    all steps.
    """

    def __init__(self, track: str, run_dir: Path, flags: dict, start: int = 0):
        """start: number of steps that a resumed run has done. Raises BadInput if the tracker cannot be opened."""
        self.track = track
        self.closed = track == "none"
        self.failed = False
        if self.closed:
            return
        # The user's own settings win.
        for name, value in VARIABLES.get(track, {}).items():
            os.environ.setdefault(name, value.format(run_dir=run_dir.absolute()))
        self.failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
        # Each package is imported only if it was chosen, and so are its exceptions.
        if track in ERRORS:
            self.failures += (pkgutil.resolve_name(ERRORS[track]),)
        try:
            opened = open_tracker(track, run_dir, flags, Resumed(start, kept_id(track, run_dir) if start else ""))
        except self.failures as error:
            raise BadInput(f"--track {track}: cannot be opened: {one_line(error)}") from None
        self.send = opened.log
        self.finish = opened.finish
        keep_id(track, run_dir, opened.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of a step."""
        if self.closed:
            return
        try:
            self.send({name: value for name, value in metrics.items() if name != "step"}, step=step)
        except self.failures as error:
            self.warn_once(error, f"at step {step}")

    def close(self) -> None:
        """End the tracker's run. A run that fails may close it twice."""
        if self.closed:
            return
        self.closed = True
        try:
            self.finish()
        except self.failures as error:
            self.warn_once(error, "at the end")

    def warn_once(self, error: Exception, when: str) -> None:
        if not self.failed:
            message = f"--track {self.track} failed {when}: {one_line(error)}; metrics.jsonl has all steps"
            warn(message, "tracker-failed")
        self.failed = True


def kept_id(track: str, run_dir: Path) -> str:
    """The id of the tracker's run that the run in run_dir has had before; "" if there was none. Raises BadInput."""
    file = run_dir / KEPT_ID
    if not file.is_file():
        return ""
    kept = read_object(file).get(track, "")
    if not isinstance(kept, str):
        raise BadInput(f'{file}: "{track}" must be the id of a run, a text; remove the file to begin another one')
    return kept


def keep_id(track: str, run_dir: Path, run_id: str) -> None:
    """Write the id of the tracker's run, next to those of other trackers that the run has had."""
    file = run_dir / KEPT_ID
    if not run_id:
        return
    kept = read_object(file) if file.is_file() else {}
    folders.write(file, json.dumps({**kept, track: run_id}, indent=2) + "\n")


def open_tracker(track: str, run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    openers = {
        "wandb": open_wandb,
        "tensorboard": open_tensorboard,
        "mlflow": open_mlflow,
        "trackio": open_trackio,
        "swanlab": open_swanlab,
    }
    return openers[track](run_dir, flags, resumed)


def open_wandb(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/wandb; `wandb sync` uploads it later."""
    import wandb

    # "allow" makes the run if it is not there: one that was offline may not have been uploaded yet.
    resume = {"id": resumed.id, "resume": "allow"} if resumed.id else {}
    run = wandb.init(project=PROJECT, name=run_dir.name, dir=run_dir, config=flags, mode=wandb_mode(), **resume)
    return Opened(run.log, run.finish, run.id)


def open_tensorboard(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/tensorboard; `tensorboard --logdir RUN` shows it. It has no place for the flags."""
    from torch.utils.tensorboard import SummaryWriter

    # Steps that the resumed run repeats disappear from the curves of the file before.
    purge_step = resumed.start + 1 if resumed.start else None
    writer = SummaryWriter(run_dir / "tensorboard", purge_step=purge_step)

    def log(metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Opened(log, writer.close)


def open_mlflow(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """MLFLOW_TRACKING_URI, or RUN/mlflow.db; `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it."""
    import mlflow

    # Otherwise it reports each step of making a new database.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
        if mlflow.get_experiment_by_name(PROJECT) is None:
            mlflow.create_experiment(PROJECT, artifact_location=(run_dir.absolute() / "mlruns").as_uri())
    mlflow.set_experiment(PROJECT)
    if resumed.id:
        # Its flags are those that it began with. mlflow refuses to change one, such as --steps.
        run = mlflow.start_run(run_id=resumed.id)
    else:
        run = mlflow.start_run(run_name=run_dir.name)
        mlflow.log_params(flags)
    return Opened(mlflow.log_metrics, mlflow.end_run, run.info.run_id)


def open_trackio(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/trackio; `TRACKIO_DIR=RUN/trackio trackio show` shows it. TRACKIO_SPACE_ID uploads to a Space."""
    import trackio

    # It knows its runs by their names.
    if resumed.id:
        run = trackio.init(project=PROJECT, name=resumed.id, config=flags, resume="allow")
    else:
        run = trackio.init(project=PROJECT, name=run_dir.name, config=flags)
    return Opened(trackio.log, trackio.finish, run.name)


def open_swanlab(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/swanlab; `swanlab sync` uploads it later. SWANLAB_MODE=online uploads at once."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or "offline"
    resume = {"id": resumed.id, "resume": "allow"} if resumed.id else {}
    log_dir = str(run_dir / "swanlab")
    run = swanlab.init(project=PROJECT, name=run_dir.name, config=flags, log_dir=log_dir, mode=mode, **resume)
    return Opened(swanlab.log, swanlab.finish, run.id)


def one_line(error: Exception) -> str:
    """The message of an exception without line ends, at most 300 characters of it."""
    return " ".join(str(error).split())[:300]
