"""The measurements of docs/how-it-works.md.

    python scripts/walkthrough.py learn masters noise --seeds 0 1 2
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).parent))
import claims
import study
import variants

from common import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/how-it-works.md"
FOLDER = ROOT / "baselines/walkthrough"
# What each ablation needs beyond the flags of the embedded job when it is trained.
LEARNED = {
    "groups": "",
    "end-token": "",
    "masters": "",
    "noise": "",
    "clip-side": "",
}


@dataclasses.dataclass
class Args:
    action: tyro.conf.Positional[Literal["learn"]]
    names: tyro.conf.Positional[tuple[str, ...]] = ()  # Ablations. Default: all.
    seeds: tuple[int, ...] = (0, 1, 2)
    folder: str = str(FOLDER.relative_to(ROOT) / "learning")  # Where the CSVs of `learn` are. Runs with one are skipped.


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run with a bug."""

    name: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / self.name / f"seed{self.seed}.csv"

    def flags(self) -> str:
        return " ".join(f"{claims.TASKS['arithmetic']} {LEARNED[self.name]} --seed {self.seed}".split())


def diffs(page: str) -> dict[str, str]:
    """name -> diff, of each detail that breaks some code."""
    found = re.findall(r"^```diff\n(.*?)^```\n\n<!-- measured: ([\w-]+) -->$", page, re.MULTILINE | re.DOTALL)
    return {name: diff for diff, name in found}


def learn(cell: Cell, folder: Path) -> str:
    """Train with a bug, write the run's CSV and JSON, and say how it ended. Raises RuntimeError if it fails."""
    diff = diffs(PAGE.read_text())[cell.name]
    broken = variants.apply(diff, (ROOT / variants.base(diff)).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "grpo_broken.py"
        file.write_text(broken)
        run_dir = Path(scratch) / "run"
        ended = subprocess.run(
            [sys.executable, str(file), *cell.flags().split(), "--run-dir", str(run_dir)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rows, about = study.result(run_dir, ended.returncode, ended.stdout)
    about |= {"flags": cell.flags(), "seed": cell.seed, "diff": diff}
    study.write_run(cell.file(folder), rows, about, claims.COLUMNS)
    minutes = sum(row.get("time/step", 0.0) for row in rows) / 60
    return f"{study.final_accuracy(rows):.1%} in {minutes:.1f} minutes"


def learn_all(args: Args) -> None:
    names = args.names or tuple(LEARNED)
    folder = ROOT / args.folder
    cells = [Cell(name, seed) for seed in args.seeds for name in names]
    cells = [cell for cell in cells if not cell.file(folder).exists()]
    if study.run_all(cells, lambda cell: learn(cell, folder), jobs=1):
        sys.exit(1)


def main(args: Args) -> None:
    unknown = [name for name in args.names if name not in LEARNED]
    if unknown:
        raise errors.BadInput(f"{', '.join(unknown)}: no ablation; use some of {', '.join(LEARNED)}")
    learn_all(args)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
