"""The trackers of --track, which mirror metrics.jsonl. A package is imported when its tracker is chosen.

Each tracker writes into the run directory and needs no network, unless its own environment variables say otherwise.
The functions open_NAME return (log, finish): log(metrics, step=step) adds a step, and finish() ends the run.

accelerate.tracking has the same five. It needs accelerate's PartialState, which takes over the process: devices,
variables of torchrun, numbers of threads. TensorBoard's class refuses our flags, because some are tuples. Folders,
offline modes and exceptions would still be ours, and with them most of this file.
"""

import logging
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path

from common.errors import BadInput, warn
from common.preflight.machine import wandb_mode

Opened = tuple[Callable[..., None], Callable[[], None]]
PROJECT = "onefile-rl"  # name of the project, or of the experiment, in each tracker
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


class Sink:
    """Sends metrics to --track. Rank 0 has one.

    A tracker that fails after it was opened does not end the run: its first failure is a warning, and metrics.jsonl has
    all steps.
    """

    def __init__(self, track: str, run_dir: Path, flags: dict):
        """Raises BadInput if the tracker cannot be opened."""
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
            self.send, self.finish = open_tracker(track, run_dir, flags)
        except self.failures as error:
            raise BadInput(f"--track {track}: cannot be opened: {one_line(error)}") from None

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


def open_tracker(track: str, run_dir: Path, flags: dict) -> Opened:
    openers = {
        "wandb": open_wandb,
        "tensorboard": open_tensorboard,
        "mlflow": open_mlflow,
        "trackio": open_trackio,
        "swanlab": open_swanlab,
    }
    return openers[track](run_dir, flags)


def open_wandb(run_dir: Path, flags: dict) -> Opened:
    """RUN/wandb; `wandb sync` uploads it later."""
    import wandb

    run = wandb.init(project=PROJECT, name=run_dir.name, dir=run_dir, config=flags, mode=wandb_mode())
    return run.log, run.finish


def open_tensorboard(run_dir: Path, flags: dict) -> Opened:
    """RUN/tensorboard; `tensorboard --logdir RUN` shows it. It has no place for the flags."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard")

    def log(metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_mlflow(run_dir: Path, flags: dict) -> Opened:
    """MLFLOW_TRACKING_URI, or RUN/mlflow.db; `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it."""
    import mlflow

    # Otherwise it reports each step of making a new database.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
        if mlflow.get_experiment_by_name(PROJECT) is None:
            mlflow.create_experiment(PROJECT, artifact_location=(run_dir.absolute() / "mlruns").as_uri())
    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=run_dir.name)
    mlflow.log_params(flags)
    return mlflow.log_metrics, mlflow.end_run


def open_trackio(run_dir: Path, flags: dict) -> Opened:
    """RUN/trackio; `TRACKIO_DIR=RUN/trackio trackio show` shows it. TRACKIO_SPACE_ID uploads to a Space."""
    import trackio

    trackio.init(project=PROJECT, name=run_dir.name, config=flags)
    return trackio.log, trackio.finish


def open_swanlab(run_dir: Path, flags: dict) -> Opened:
    """RUN/swanlab; `swanlab sync` uploads it later. SWANLAB_MODE=online uploads at once."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or "offline"
    swanlab.init(project=PROJECT, name=run_dir.name, config=flags, log_dir=str(run_dir / "swanlab"), mode=mode)
    return swanlab.log, swanlab.finish


def one_line(error: Exception) -> str:
    """The message of an exception without line ends, at most 300 characters of it."""
    return " ".join(str(error).split())[:300]
