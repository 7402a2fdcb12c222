"""How many statements is each algorithm file away from its nearest sibling? Makes a table of it.

python scripts/sibling_diffs.py                    # the table, written into PAGE
python scripts/sibling_diffs.py --show dr_grpo     # the diff itself
"""

import ast
import dataclasses
import difflib
import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent))
import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/algorithms/README.md"
SIBLINGS = {  # algorithm: (nearest sibling, what the hunks do)
    "dr_grpo": ("grpo", "no std; a constant for each response's length"),
    "max_rl": ("dr_grpo", "the group's mean as unit of the advantage"),
    "gspo": ("grpo", "one ratio for a response"),
    "cispo": ("grpo", "a bounded weight in the place of a clipped ratio; token mean"),
    "rloo": ("grpo", "leave-one-out baseline; KL in the reward; token mean"),
    "remax": ("rloo", "a greedy response as baseline; a reward-to-go for each token"),
    "reinforce_pp": ("remax", "no greedy response; a group's mean, if asked for; whitening"),
    "dapo": ("grpo", "two clips and dual clip; dynamic sampling; overlong shaping; token mean; no reference"),
    "ppo": ("grpo", "critic, GAE, whitening, value loss; KL in the token rewards; no groups"),
    "opd": ("rloo", "a teacher's log-probs as advantages, or its distributions in the loss; no reward"),
    "sdpo": ("opd", "the policy after a hint as the teacher, its weights; which responses have a hint"),
    "dpo": ("sft", "pairs, the reference's log-probs, the loss; starts from the warm start"),
    "prime": ("rloo", "process reward model and its update; dynamic sampling; process and outcome; whitening"),
}


@dataclasses.dataclass
class Args:
    show: str = ""  # Name of an algorithm, whose diff is printed.


def code(name: str) -> list[str]:
    """Statements of algos/NAME.py, one a line: without docstrings and comments, however the source is laid out."""
    tree = ast.parse((ROOT / f"algos/{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [line for line in ast.unparse(tree).splitlines() if line]


def changes(name: str) -> list[str]:
    """Unified diff from the sibling, without context."""
    return list(difflib.unified_diff(code(SIBLINGS[name][0]), code(name), SIBLINGS[name][0], name, n=0, lineterm=""))


def table() -> str:
    lines = [
        "| file | diff against | hunks | statements removed | statements added | what they are |",
        "|---" * 6 + "|",
    ]
    for name, (sibling, what) in SIBLINGS.items():
        diff = changes(name)[2:]
        hunks, removed, added = (sum(line.startswith(mark) for line in diff) for mark in ("@@", "-", "+"))
        lines.append(f"| `{name}.py` | `{sibling}.py` | {hunks} | {removed} | {added} | {what} |")
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.show and args.show not in SIBLINGS:
        sys.exit(f"error: --show {args.show}: expected {', '.join(SIBLINGS)}")
    if args.show:
        print("\n".join(changes(args.show)))
        return
    text = table()
    blocks.write(PAGE, "siblings", text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
