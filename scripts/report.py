"""Write RUN_DIR/report.html from what a run has saved so far: python scripts/report.py runs/grpo"""

from pathlib import Path

import tyro

from common import errors
from common.run import report


def main(run_dir: Path) -> None:
    if not (run_dir / "metrics.jsonl").is_file():
        raise errors.BadInput(f"{run_dir}: no metrics.jsonl; is this a run directory?")
    print(report.write(run_dir))


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Path, prog="report.py", description=__doc__))
