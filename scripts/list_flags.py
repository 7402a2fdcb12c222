"""Write docs/flags.md, and print it: the flags of all algorithm files, with their defaults and meanings.

python scripts/list_flags.py
"""

import importlib
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parent))
import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/flags.md"
SHOWN = {"": "", "''": "", "False": "off", "True": "on"}  # how tyro writes a default -> how the page does
NAMES = sorted(path.stem for path in ROOT.glob("algos/[!_]*.py"))


def flags(name: str) -> dict[tuple[str, str], str]:
    """(flag, meaning) -> default, of algos/NAME.py with a --model of your own, in the order of its --help."""
    args = importlib.import_module(f"algos.{name}").Args
    # tyro calls this function deprecated, but has no other that lists the flags. The lock pins its version.
    parser = tyro.extras.get_parser(args, default=args())
    found = {}
    for action in parser._actions[1:]:  # the first is --help
        meaning, default = re.fullmatch(r"(.*) \(default: (.*)\)", action.help, re.DOTALL).groups()
        key = action.option_strings[0], in_a_cell(meaning)
        found[key] = in_a_cell(SHOWN.get(default, f"`{default}`"))
    return found


def in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def default_of(defaults: dict[str, str]) -> str:
    """The most frequent default, and the files that have another. defaults: file -> default."""
    usual, _ = Counter(defaults.values()).most_common(1)[0]
    others = defaultdict(list)
    for name, default in defaults.items():
        if default != usual:
            others[default].append(name)
    return "; ".join([usual, *(f"{default} in {listed(names)}" for default, names in others.items())])


def table() -> str:
    """Four tables, from the flags of all files to those of a few. A flag with two meanings has two lines."""
    sampling = set()
    known: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # (flag, meaning) -> file -> default
    for name in NAMES:
        for (flag, meaning), default in flags(name).items():
            known[flag, meaning][name] = default
            if flag == "--reward":
                sampling.add(name)

    titles = ("All files", "All files that sample", "Some files that sample", "Files that sample nothing")
    tables: dict[str, list[str]] = {title: [] for title in titles}
    for (flag, meaning), defaults in known.items():
        if len(defaults) == len(NAMES):
            title = "All files"
        elif sampling <= set(defaults):
            title = "All files that sample"
            if more := sorted(set(defaults) - sampling):
                meaning += f" Also in {listed(more)}."
        elif sampling & set(defaults):
            title = "Some files that sample"
        else:
            title = "Files that sample nothing"
        files = "" if title.startswith("All") else f" {files_of(list(defaults), sampling)} |"
        tables[title].append(f"| `{flag}` |{files} {default_of(defaults)} | {meaning} |")

    lines = []
    for title, rows in tables.items():
        columns = ["flag", *["files"] * (not title.startswith("All")), "default", "meaning"]
        lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, ""]
    return "\n".join(lines[:-1])


def files_of(names: list[str], sampling: set[str]) -> str:
    """Those files, or the sampling ones that are missing, whichever are fewer."""
    missing = sorted(sampling - set(names))
    return listed(names) if len(names) <= len(missing) else f"all but {listed(missing)}"


def main() -> None:
    text = table()
    blocks.write(PAGE, "flags", text)
    print(text)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
