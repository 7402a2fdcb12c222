"""Write a variant of an algorithm: the few lines of docs/variants.md, applied to a copy of the file that they change.

python scripts/variants.py                             # the names
python scripts/variants.py sapo algos/mine.py          # algos/grpo.py with SAPO's lines
"""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import tyro

from common import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/variants.md"


@dataclasses.dataclass
class Args:
    name: tyro.conf.Positional[str] = ""  # A heading of docs/variants.md, in small letters with hyphens.
    file: tyro.conf.Positional[str] = ""  # Where to write the changed copy.
    base: tyro.conf.Positional[str] = ""  # File to change. Default: the one that the page names.


def variants(page: str) -> dict[str, str]:
    """name -> diff, of all sections of the page that have one."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    diffs = {title: re.search(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for title, text in sections}
    return {title.lower().replace(" ", "-"): found[1] for title, found in diffs.items() if found}


def base(diff: str) -> str:
    """The file that a diff changes: "algos/grpo.py"."""
    return diff.splitlines()[0].removeprefix("--- ")


def apply(diff: str, source: str) -> str:
    """The source with a diff applied: its lines without line numbers, hunks after @@. Raises BadInput.

    The removed lines of a hunk, with the unchanged ones between them, must stand in the source exactly once.
    """
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        before, after = ("".join(line[1:] + "\n" for line in lines if line[:1] in (" ", mark)) for mark in "-+")
        if source.count(before) != 1:
            found = f"{source.count(before)} places in the file to change ({base(diff)} on the page)"
            raise errors.BadInput(f"docs/variants.md: {found} are like this, expected one:\n{before}")
        source = source.replace(before, after)
    return source


def source(name: str, file: str = "") -> str:
    """The text of `file`, or of the one that the page names, with a variant's lines. Raises BadInput."""
    diff = variants(PAGE.read_text())[name]
    return apply(diff, Path(file or ROOT / base(diff)).read_text())


def load(name: str, file: str = "") -> ModuleType:
    """A variant as a module, without writing it."""
    module = ModuleType(f"variant {name}")
    sys.modules[module.__name__] = module  # where dataclasses look
    exec(compile(source(name, file), module.__name__, "exec"), vars(module))
    return module


def main(args: Args) -> None:
    known = variants(PAGE.read_text())
    if not args.name:
        print("\n".join(f"{name:24}{base(diff)}" for name, diff in known.items()))
        return
    if args.name not in known:
        raise errors.BadInput(f'"{args.name}" is no variant; known: {", ".join(known)}')
    if not args.file or Path(args.file).exists():
        raise errors.BadInput(f'"{args.file}": name a file that does not exist yet, for example algos/mine.py')
    if args.base and not Path(args.base).is_file():
        raise errors.BadInput(f"{args.base}: no such file")
    diff = known[args.name]
    Path(args.file).write_text(source(args.name, args.base))
    lines = sum(line.startswith("+") for line in diff.splitlines())
    print(f"{args.file}: {args.base or base(diff)} with {lines} other lines")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
