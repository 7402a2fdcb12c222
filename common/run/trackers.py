"""The trackers of --track, which mirror metrics.jsonl. A package is imported when its tracker is chosen.

Each tracker writes into the run directory and needs no network, unless its own environment variables say otherwise.
The functions open_NAME return (log, finish): log(metrics, step) adds a step, and finish() ends the run.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from common.errors import BadInput, warn
from common.preflight.machine import wandb_mode

Opened = tuple[Callable[[dict, int], None], Callable[[], None]]
PROJECT = "onefile-rl"  # name of the project, or of the experiment, in each tracker
# Variables that a package reads when it is imported: no reports to its makers, and no files in the home directory.
VARIABLES = {
    "wandb": {"WANDB_ERROR_REPORTING": "false", "WANDB_CACHE_DIR": "{run_dir}/wandb/cache"},
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "trackio": {"TRACKIO_DIR": "{run_dir}/trackio"},
}
ERRORS = {  # tracker -> module and name of its exceptions, in addition to OSError, RuntimeError and ValueError
    "wandb": ("wandb.errors", "Error"),
    "mlflow": ("mlflow.exceptions", "MlflowException"),
    "swanlab": ("swanlab.exceptions", "AuthenticationError"),
}


def open_sink(track: str, run_dir: Path, flags: dict) -> Callable:
    """A function (step, metrics) that logs to --track; (None, None) closes it. Raises BadInput.

    A tracker that fails later does not end the run: the first failure is a warning, and metrics.jsonl has all steps.
    """
    if track == "none":
        return lambda step, metrics: None
    for name, value in VARIABLES.get(track, {}).items():
        os.environ.setdefault(name, value.format(run_dir=run_dir.absolute()))
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
    if track in ERRORS:
        module, name = ERRORS[track]
        failures += (getattr(import_module(module), name),)
    opening = {"wandb": open_wandb, "tensorboard": open_tensorboard, "mlflow": open_mlflow, "trackio": open_trackio}
    try:
        log, finish = {**opening, "swanlab": open_swanlab}[track](run_dir, flags)
    except failures as error:
        raise BadInput(f"--track {track}: cannot be opened: {one_line(error)}") from None
    failed, closed = [], []

    def sink(step: int | None, metrics: dict[str, float] | None) -> None:
        if closed:  # a run that fails may be closed twice
            return
        try:
            if step is None:
                closed.append(True)
                finish()
            else:
                log({name: value for name, value in metrics.items() if name != "step"}, step)
        except failures as error:
            if not failed:
                where = "at the end" if step is None else f"at step {step}"
                said = f"--track {track} failed {where}: {one_line(error)}; metrics.jsonl has all steps"
                warn(said, "tracker-failed")
            failed.append(step)

    return sink


def open_wandb(run_dir: Path, flags: dict) -> Opened:
    """RUN/wandb; `wandb sync` uploads it later."""
    import wandb

    run = wandb.init(project=PROJECT, name=run_dir.name, dir=run_dir, config=flags, mode=wandb_mode())
    return lambda metrics, step: run.log(metrics, step=step), run.finish


def open_tensorboard(run_dir: Path, flags: dict) -> Opened:
    """RUN/tensorboard; `tensorboard --logdir RUN` shows it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard")

    def log(metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_mlflow(run_dir: Path, flags: dict) -> Opened:
    """MLFLOW_TRACKING_URI, or RUN/mlflow.db; `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it."""
    import mlflow

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # says how it makes a new database
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
        if mlflow.get_experiment_by_name(PROJECT) is None:
            mlflow.create_experiment(PROJECT, artifact_location=(run_dir.absolute() / "mlruns").as_uri())
    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=run_dir.name)
    mlflow.log_params(flags)
    return lambda metrics, step: mlflow.log_metrics(metrics, step=step), mlflow.end_run


def open_trackio(run_dir: Path, flags: dict) -> Opened:
    """RUN/trackio; `TRACKIO_DIR=RUN/trackio trackio show` shows it. TRACKIO_SPACE_ID uploads to a Space."""
    import trackio

    trackio.init(project=PROJECT, name=run_dir.name, config=flags)
    return lambda metrics, step: trackio.log(metrics, step=step), trackio.finish


def open_swanlab(run_dir: Path, flags: dict) -> Opened:
    """RUN/swanlab; `swanlab sync` uploads it later. SWANLAB_MODE=online uploads at once."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or "offline"
    swanlab.init(project=PROJECT, name=run_dir.name, config=flags, log_dir=str(run_dir / "swanlab"), mode=mode)
    return lambda metrics, step: swanlab.log(metrics, step=step), swanlab.finish


def one_line(error: Exception) -> str:
    """The message of an exception without line ends, at most 300 characters of it."""
    return " ".join(str(error).split())[:300]
