"""A control: each problem of the task `functions` with the tests of another one. They must not make a model better.

python baselines/shuffled_tests.py runs/functions-shuffled.jsonl
"""

import json
import sys
from pathlib import Path

from common.data import tasks

rows = tasks.problems("functions", "train")
tests = [row["test_list"] for row in rows]
# The rows are in a random order, and by one place no row keeps its own.
shuffled = [row | {"test_list": others} for row, others in zip(rows, tests[1:] + tests[:1])]
file = Path(sys.argv[1])
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text("".join(json.dumps(row) + "\n" for row in shuffled))
