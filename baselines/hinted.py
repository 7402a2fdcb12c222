"""Sums whose prompt shows a right solution or the right answer: python baselines/hinted.py FILE [test]

A model that has only seen plain sums cannot read a hint: for algos/sdpo.py it would be no teacher. These rows teach the
warm start to read hints. The other rows keep its sloppy way of adding without one. The result is baselines/hints-start:

    python baselines/hinted.py runs/hinted.jsonl
    python algos/sft.py --model baselines/warm-start --dataset arithmetic=3 runs/hinted.jsonl --learning-rate 1e-3
        --steps 400 --output baselines/hints-start

Can it read them? With "test" the file has the held-out problems:

    python baselines/hinted.py runs/hinted-test.jsonl test
    python scripts/evaluate.py --model baselines/hints-start --dataset runs/hinted-test.jsonl --max-response-tokens 48
"""

import json
import sys
from pathlib import Path

from algos.sdpo import EMBEDDED, with_hint
from common.data import arithmetic

split = sys.argv[2] if len(sys.argv) > 2 else "train"
lines = []
for number, row in enumerate(arithmetic.problems(split)):
    first, second = row["question"].rstrip("=").split("+")
    right = arithmetic.solution(int(first), int(second))
    hint = row["answer"] if number % 2 else right
    prompt = with_hint(row["question"], hint, EMBEDDED["hint_template"])
    lines.append(json.dumps({"prompt": prompt, "solution": right, "answer": row["answer"]}) + "\n")
file = Path(sys.argv[1])
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text("".join(lines))
