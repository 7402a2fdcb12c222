"""Stages the Markdown pages: copies them, and lets every link lead to a page or a file of the site.

The pages stay plain Markdown that GitHub shows: they link to `../algos/grpo.py`, and the site has a page for that file.
"""

import ast
import functools
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from website import anchors, curves, equations, listings, notebook

ROOT = Path(__file__).parents[2]
# Pages outside docs/, and where the site has them.
ELSEWHERE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "baselines/README.md": "baselines.md",
    "baselines/performance/README.md": "performance.md",
    "baselines/staleness/README.md": "staleness.md",
    "speedrun/README.md": "speedrun.md",
}
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<target>(?!https?:|mailto:)[^)\s]+)\)")


def sources() -> dict[str, str]:
    """File of this repository -> page of the site, of every Markdown page and notebook."""
    found = dict(ELSEWHERE)
    for path in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")]):
        page = path.relative_to(ROOT / "docs").with_suffix(".md")
        if page.name == "README.md":
            page = page.with_name("index.md")
        found[path.relative_to(ROOT).as_posix()] = page.as_posix()
    return found


class Site:
    """The folder of staged pages. A link to a file that has no page yet adds one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pages = sources()

    def stage(self) -> None:
        for source, page in list(self.pages.items()):
            path = ROOT / source
            text = notebook.markdown(path) if path.suffix == ".ipynb" else path.read_text()
            self.write(page, self.prepare(source, page, text))

        for picture in ROOT.glob("baselines/*/curves.svg"):
            self.copy(picture.relative_to(ROOT).as_posix())  # what a figure shows without JavaScript

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def prepare(self, source: str, page: str, text: str) -> str:
        if source == "docs/metrics.md":
            text = metric_headings(text)
        if source == "README.md":
            text = text.replace("# onefile-rl\n", "# Overview\n", 1)  # the front page has the other heading
        if source == "docs/index.md":
            text = text.replace("<!-- algorithms -->", rebased(readme_section("Which algorithm")))
        text = outside_fences(text, lambda part: self.relink(source, page, part))
        algorithm = PurePosixPath(source).stem
        if source.startswith("docs/algorithms/") and algorithm != "README":
            text = self.with_code(algorithm, page, text)
        return equations.rendered(text)

    def relink(self, source: str, page: str, text: str) -> str:
        def replaced(match: re.Match) -> str:
            target = self.target(source, match["target"], match["text"])
            if not target.startswith(("#", "https:")):
                target = os.path.relpath(target, PurePosixPath(page).parent)
            return f"[{match['text']}]({target})"

        return LINK.sub(replaced, text)

    def target(self, source: str, link: str, text: str) -> str:
        """Where a link of the page `source` leads on the site. text: what is written in its brackets."""
        name, _, anchor = link.partition("#")
        if not name:
            return link
        path = Path(os.path.normpath(ROOT / source / ".." / name))
        file = path.relative_to(ROOT).as_posix()
        mark = f"#{anchor}" if anchor else ""
        if path.is_dir():
            file = f"{file}/README.md" if f"{file}/README.md" in self.pages else file
        if file == "algos":
            return "algorithms/index.md"
        if file in self.pages:
            return self.pages[file] + mark + (definition(path, text) if path.suffix == ".py" else "")
        if path.suffix == ".py":
            return self.code_page(file) + definition(path, text)
        if path.is_dir():
            return f"{addresses()['Repository']}/tree/main/{file}"
        self.copy(file)
        return file + mark

    def copy(self, file: str) -> None:
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, self.folder / file)

    def code_page(self, file: str) -> str:
        """A page with the lines of a Python file. That of an algorithm is part of the algorithm's page."""
        if file.startswith("algos/"):
            return f"algorithms/{PurePosixPath(file).stem}.md"
        page = f"code/{PurePosixPath(file).with_suffix('.md')}"
        if file not in self.pages:
            self.pages[file] = page
            self.write(page, f"{HIDDEN}# {file}\n\n{listings.code(ROOT / file)}\n")
        return page

    def with_code(self, name: str, page: str, text: str) -> str:
        """The page of an algorithm with its curve, its code and what it changes in its sibling."""
        title, rest = text.split("\n", 1)
        before, results = rest.split("\n## Results\n")
        jumps = "[Equations](#equations){ .md-button } [Curve](#curve){ .md-button } [Code](#code){ .md-button } "
        jumps += "[Diff](#diff){ .md-button }\n{ .jumps }"
        parts = [
            "---\nhide:\n  - toc\n---",
            title,
            jumps,
            before,
            f"## Curve\n\n{curves.figure(name)}",
            f"## Results\n{results}",
            f"## Code\n\n{listings.code(ROOT / f'algos/{name}.py')}",
            f"## Diff\n\n{listings.sibling(name)}",
        ]
        return "\n\n".join(parts) + "\n"


# Long listings would drown the pages in a search.
HIDDEN = "---\nhide:\n  - navigation\n  - toc\nsearch:\n  exclude: true\n---\n\n"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with all but its fenced blocks changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


@functools.cache
def definitions(path: Path) -> dict[str, int]:
    """Name of a function, a class or a method `Class.method` -> its first line."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method.lineno for method in methods}
    return found


def definition(path: Path, text: str) -> str:
    """Anchor of the line that defines what the text of a link names, or of the listing."""
    line = definitions(path).get(text.strip("`"))
    if line:
        return f"#L{line}"
    return "#code" if path.parent.name == "algos" else ""


def addresses() -> dict[str, str]:
    """Name -> address, from pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]


def readme_section(heading: str) -> str:
    return (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0].strip()


def rebased(text: str) -> str:
    """Links of the README, as seen from docs/."""
    return LINK.sub(lambda match: f"[{match['text']}](../{match['target']})", text)


def metric_headings(text: str) -> str:
    """Each row of a table of metrics as a section, so that search finds the metric and links can name it."""
    lines, in_metrics = [], False
    for line in text.splitlines():
        row = re.fullmatch(r"\| (`.*?`) \| (.*) \|", line)
        if line == "| key | meaning |":
            in_metrics = True
        elif in_metrics and row:
            first = row[1].split("`")[1]
            lines += ["", f"#### {row[1]} {{ #{anchors.metric(first)} }}", "", row[2]]
        elif not in_metrics or not line.startswith("|"):
            in_metrics = False
            lines.append(line)
    return "\n".join(lines) + "\n"
