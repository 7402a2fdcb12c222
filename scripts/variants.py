"""Write a variant of an algorithm: a copy of its file, with the few lines of docs/variants.md in place.

    python scripts/variants.py                             # lists the names
    python scripts/variants.py sapo algos/mine.py          # writes algos/grpo.py with SAPO's lines
    python scripts/variants.py icepop algos/mine.py algos/rloo.py       # puts IcePop's lines into another file

A diff on that page has no line numbers, because they would be wrong after every edit of the file:

    --- algos/grpo.py          the file that it changes
    @@                         starts a hunk
     unchanged line
    -old line
    +new line

The old and unchanged lines of a hunk must stand in the file exactly once. Otherwise nothing is written.
"""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import tyro

from common import errors
from common.preflight.docstrings import help_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/variants.md"


@dataclasses.dataclass
class Args:
    name: tyro.conf.Positional[str] = ""  # A heading of docs/variants.md, in small letters with hyphens.
    file: tyro.conf.Positional[str] = ""  # Where to write the changed copy.
    base: tyro.conf.Positional[str] = ""  # File to change. Default: the one that the page names.


def variants(page: str) -> dict[str, str]:
    """name -> diff, for all sections of the page that have one."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    diffs = {}
    for title, text in sections:
        block = re.search(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if block:
            name = title.lower().replace(" ", "-")
            diffs[name] = block[1]
    return diffs


def base(diff: str) -> str:
    """The file that a diff changes: "algos/grpo.py"."""
    first_line = diff.splitlines()[0]
    return first_line.removeprefix("--- ")


def apply(diff: str, source: str) -> str:
    """The source with a diff applied. Raises BadInput for a hunk that does not fit exactly one place."""
    hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]
    for hunk in hunks:
        before = lines_marked(hunk, " -")
        after = lines_marked(hunk, " +")
        places = source.count(before)
        if places != 1:
            raise errors.BadInput(
                f"{places} places in {base(diff)}, or in the file in its place, are like this, expected one:\n{before}"
            )
        source = source.replace(before, after)
    return source


def lines_marked(hunk: str, marks: str) -> str:
    """The lines of a hunk that start with one of these characters, without it."""
    return "".join(line[1:] + "\n" for line in hunk.splitlines() if line.startswith(tuple(marks)))


def source(name: str, file: str = "") -> str:
    """The text of `file`, or of the one that the page names, with a variant's lines. Raises BadInput."""
    diff = variants(PAGE.read_text())[name]
    path = Path(file or ROOT / base(diff))
    return apply(diff, path.read_text())


def load(name: str, file: str = "") -> ModuleType:
    """A variant as a module, without writing it."""
    return module(f"variant {name}", source(name, file))


def module(name: str, text: str) -> ModuleType:
    """The text of a Python file as a module."""
    made = ModuleType(name)
    sys.modules[name] = made  # dataclasses look up their module there
    exec(compile(text, name, "exec"), vars(made))
    return made


def main(args: Args) -> None:
    diffs = variants(PAGE.read_text())
    if not args.name:
        for name, diff in diffs.items():
            print(f"{name:24}{base(diff)}")
        return
    if args.name not in diffs:
        raise errors.BadInput(f'"{args.name}" is not a variant; use one of {", ".join(diffs)}')
    if not args.file or Path(args.file).exists():
        raise errors.BadInput(f'"{args.file}": name a file that does not exist yet, for example algos/mine.py')
    if args.base and not Path(args.base).is_file():
        raise errors.BadInput(f"{args.base}: no such file")
    if not Path(args.file).parent.is_dir():
        raise errors.BadInput(f"{args.file}: there is no folder {Path(args.file).parent}")
    diff = diffs[args.name]
    Path(args.file).write_text(source(args.name, args.base))
    new_lines = sum(line.startswith("+") for line in diff.splitlines())
    print(f"{args.file}: {args.base or base(diff)} with {new_lines} new lines")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
