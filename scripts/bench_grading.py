"""How long grading takes: 1,024 GSM8K responses in this process, and 1,024 MATH responses on one and on two workers.

    python scripts/bench_grading.py

The MATH responses are 8 to a prompt; some are right, some wrong, and some equal to the reference answer as strings.
"""

import dataclasses
import time

import tyro

from common.grading import Item, Result, gsm8k_reward
from common.workers import MathReward, WorkerPool

GSM8K_SOLUTION = """\
She sells {a} eggs on Monday and {b} on Tuesday, so {a} + {b} = <<{a}+{b}={total}>>{total} eggs in all.
At $1.50 each that would be more than $20, but the first {a} were a gift.
#### {total}"""
MATH_GROUP = [  # the responses to one prompt, whose reference answer is \\frac{n}{2}
    r"\frac{{{n}}}{{2}}", r"\frac{{{n}}}{{2}}", r"\dfrac{{{n}}}{{2}}", r"{n}/2", r"0.5 \cdot {n}", r"x = {n}/2",
    r"\frac{{{n}}}{{3}}", r"{n}",
]  # fmt: skip


@dataclasses.dataclass
class Args:
    responses: int = 1024
    repeats: int = 3  # the shortest time counts
    workers: int = 2  # compared with one


def gsm8k_seconds(args: Args) -> float:
    items = [
        Item("", GSM8K_SOLUTION.format(a=n, b=2 * n, total=3 * n), f"{3 * n:,}") for n in range(1, args.responses + 1)
    ]
    start = time.perf_counter()
    results = gsm8k_reward(items, [], [], "flexible")
    seconds = time.perf_counter() - start
    assert all(result.acc == 1 for result in results)
    return seconds


def math_items(args: Args) -> list[Item]:
    texts = [(n, text) for n in range(1001, 1001 + args.responses, 2) for text in MATH_GROUP][: args.responses]
    return [Item("", rf"so it is \boxed{{{text.format(n=n)}}}", rf"\frac{{{n}}}{{2}}") for n, text in texts]


def right(results: list[Result]) -> float:
    return sum(result.acc for result in results) / len(results)


def pool_seconds(items: list[Item], pool: WorkerPool) -> float:
    """Each response through a worker, also those whose string is enough."""
    tasks = [([item], [1], [False]) for item in items]
    pool.run(tasks[:32])  # starts the workers; the first of each kind fills sympy's caches
    start = time.perf_counter()
    outcomes = pool.run(tasks)
    seconds = time.perf_counter() - start
    assert right([result for (result,) in outcomes]) == 0.75
    return seconds


def main(args: Args) -> None:
    print(f"GSM8K, in process: {min(gsm8k_seconds(args) for _ in range(args.repeats)):.3f} s")
    items, reward = math_items(args), MathReward(workers=args.workers)
    reward(items[:32], [1] * 32, [False] * 32)
    start = time.perf_counter()
    assert right(reward(items, [1] * len(items), [False] * len(items))) == 0.75
    print(f"MATH, as a reward, {args.workers} workers: {time.perf_counter() - start:.2f} s")
    pools = [WorkerPool("math", size, 10.0, 2.0, tasks_per_worker=1_000_000) for size in (1, args.workers)]
    times = [[pool_seconds(items, pool) for pool in pools] for _ in range(args.repeats)]  # in turn: fair if it is busy
    one, many = (min(column) for column in zip(*times))
    print(
        f"MATH, each response through a worker, 1 worker: {one:.2f} s; {args.workers}: {many:.2f} s ({one / many:.2f}x)"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
