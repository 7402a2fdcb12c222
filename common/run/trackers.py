"""The trackers of --track: they get metrics.jsonl, tables of responses, and report.html at the end of a run.

A package is imported when its tracker is chosen. Each tracker writes into the run directory and needs no network,
unless its own environment variables say otherwise. The functions open_NAME return an Opened. A resumed run goes on with
the tracker's run that it had before: its name for it is kept in RUN/tracker.json.

accelerate.tracking has the same five. It needs accelerate's PartialState, which takes over the process: devices,
variables of torchrun, numbers of threads. TensorBoard's class refuses our flags, because some are tuples. Folders,
offline modes and exceptions would still be ours, and with them most of this file.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from common.data.json_lines import read_object
from common.errors import BadInput, warn
from common.preflight import folders
from common.preflight.machine import wandb_mode
from common.run import response_table
from common.run.response_table import Table

PROJECT = "onefile-rl"  # name of the project, or of the experiment, in each tracker
TABLES = "responses"  # name of the tables in each tracker
LISTED_TABLES = 100  # tables of a run that mlflow lists
KEPT_ID = "tracker.json"  # file in the run directory: {tracker: the id of its run}
# Variables that a package reads when it is imported: no reports to its makers, and no files in the home directory.
VARIABLES = {
    "wandb": {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": "{run_dir}/wandb/cache",
        "WANDB_DATA_DIR": "{run_dir}/wandb/data",
    },
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "trackio": {"TRACKIO_DIR": "{run_dir}/trackio"},
}


@dataclass(frozen=True)
class Opened:
    """A tracker's run."""

    log: Callable[..., None]  # log(metrics, step=step) adds a step
    table: Callable[[Table], None]  # adds the table of a step
    file: Callable[[Path], None]  # adds a file of the run, or replaces it
    finish: Callable[[], None]  # ends the run
    id: str = ""  # with which a resumed run finds it again; "" if the folder is enough


@dataclass(frozen=True)
class Resumed:
    """What a resumed run goes on with."""

    start: int = 0  # number of steps that are done; 0 for a fresh run
    id: str = ""  # of the tracker's run; "" makes another one


class Sink:
    """Sends metrics, tables of responses and the report to --track. Rank 0 has one.

    A tracker that fails after it was opened does not end the run: its first failure is a warning, and the run directory
    has everything.
    """

    def __init__(
        self,
        track: str,
        run_dir: Path,
        flags: dict,
        start: int = 0,
        repeated: Collection[int] = (),
    ):
        """start: number of steps that a resumed run has done. repeated: later steps that wrote rollouts before.

        Raises BadInput if the tracker cannot be opened.
        """
        self.track = track
        self.closed = track == "none"
        self.failed = False
        if self.closed:
            return
        # The user's own settings win.
        for name, value in VARIABLES.get(track, {}).items():
            os.environ.setdefault(name, value.format(run_dir=run_dir.absolute()))
        resumed = Resumed(start, kept_id(track, run_dir) if start else "")
        # Trackers keep what they have. With an id it is the same run, which has the tables of these steps already.
        self.has_tables = frozenset(repeated if resumed.id else ())
        try:
            opened = open_tracker(track, run_dir, flags, resumed)
        except Exception as error:  # see call()
            raise BadInput(f"--track {track}: cannot be opened: {one_line(error)}") from None
        self.opened = opened
        keep_id(track, run_dir, opened.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of a step."""
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        self.call("log", f"at step {step}", numbers, step=step)

    def wants_table(self, step: int) -> bool:
        """Whether the tracker has no table of this step yet. Without a tracker nobody needs one."""
        return not self.closed and step not in self.has_tables

    def table(self, table: Table) -> None:
        """Send the responses of a step."""
        if self.wants_table(table.step):
            self.call("table", f"with the responses of step {table.step}", table)

    def file(self, path: Path) -> None:
        """Send a file of the run directory."""
        self.call("file", f"with {path.name}", path)

    def close(self) -> None:
        """End the tracker's run. A run that fails may close it twice."""
        self.call("finish", "at the end")
        self.closed = True

    def call(self, function: str, when: str, *given, **named) -> None:
        """Call a function of Opened. Any error is a warning: packages, and the stores that they use (sqlite3, boto3),
        have classes of their own.
        """
        if self.closed:
            return
        try:
            getattr(self.opened, function)(*given, **named)
        except Exception as error:
            if not self.failed:
                message = f"--track {self.track} failed {when}: {one_line(error)}; the run directory has everything"
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

    def table(table: Table) -> None:
        # One table for each step, which wandb shows with a slider. Once an offline run is resumed, wandb can't append.
        run.log({TABLES: wandb.Table(columns=table.columns, data=table.rows)}, step=table.step)

    def file(path: Path) -> None:
        # A link would be broken on the machine that uploads the folder later.
        copy = shutil.copy(path, run.dir)
        run.save(copy, base_path=run.dir, policy="now", glob=False)

    return Opened(run.log, table, file, run.finish, run.id)


def open_tensorboard(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/tensorboard; `tensorboard --logdir RUN` shows it. It has no place for the flags or for files."""
    from torch.utils.tensorboard import SummaryWriter

    # Steps that the resumed run repeats disappear from the file before. The first file says where it starts, too,
    # because TensorBoard drops repeated steps only from the second start that it reads.
    purge_step = resumed.start + 1 if resumed.start else 0
    writer = SummaryWriter(run_dir / "tensorboard", purge_step=purge_step)

    def log(metrics: dict, step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def table(table: Table) -> None:
        writer.add_text(TABLES, response_table.markdown(table), table.step)

    return Opened(log, table, lambda path: None, writer.close)


def open_mlflow(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """MLFLOW_TRACKING_URI, or RUN/mlflow.db; `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows it."""
    import mlflow
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

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
    # A tag of the run lists its tables. It has room for about 130 of these paths.
    listed = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))

    def table(table: Table) -> None:
        # mlflow appends by reading the file again, and turns texts into numbers. So each step has its own file.
        path = f"{TABLES}/step_{table.step:06d}.json"
        if len(listed) < LISTED_TABLES:
            columns = dict(zip(table.columns, zip(*table.rows)))
            mlflow.log_table(columns, path)
            listed.append(path)
        else:
            mlflow.log_dict({"columns": table.columns, "data": table.rows}, path)

    def file(path: Path) -> None:
        mlflow.log_artifact(str(path))

    return Opened(mlflow.log_metrics, table, file, mlflow.end_run, run.info.run_id)


def open_trackio(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/trackio; `TRACKIO_DIR=RUN/trackio trackio show` shows it. TRACKIO_SPACE_ID uploads to a Space."""
    import trackio

    # It knows its runs by their names.
    if resumed.id:
        run = trackio.init(project=PROJECT, name=resumed.id, config=flags, resume="allow")
    else:
        run = trackio.init(project=PROJECT, name=run_dir.name, config=flags)

    def table(table: Table) -> None:
        trackio.log({TABLES: trackio.Table(columns=table.columns, data=table.rows)}, step=table.step)

    def file(path: Path) -> None:
        # The runs of a project share its artifacts.
        trackio.log_artifact(path, name=f"{run.name}-{path.name}", type="report", overwrite=True)

    return Opened(trackio.log, table, file, trackio.finish, run.name)


def open_swanlab(run_dir: Path, flags: dict, resumed: Resumed) -> Opened:
    """RUN/swanlab; `swanlab sync` uploads it later. SWANLAB_MODE=online uploads at once."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or "offline"
    resume = {"id": resumed.id, "resume": "allow"} if resumed.id else {}
    log_dir = str(run_dir / "swanlab")
    run = swanlab.init(project=PROJECT, name=run_dir.name, config=flags, log_dir=log_dir, mode=mode, **resume)

    def table(table: Table) -> None:
        shown = swanlab.echarts.Table().add(table.columns, table.rows)
        swanlab.log({TABLES: shown}, step=table.step)

    def file(path: Path) -> None:
        swanlab.save(str(path), base_path=str(path.parent), policy="now")

    return Opened(swanlab.log, table, file, swanlab.finish, run.id)


def one_line(error: Exception) -> str:
    """Class and message of an exception, which may be empty, without line ends and at most 300 characters long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
