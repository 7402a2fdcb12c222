"""Every command in the README and in the docstrings of algos/ and scripts/ parses; every linked file exists."""

import importlib.util
import re
import shlex
import sys

import pytest
import tyro
from conftest import ROOT

TEXTS = [
    ROOT / "README.md",
    ROOT / "baselines/README.md",
    ROOT / "baselines/performance/README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
PAGES = [*TEXTS, *ROOT.glob("algos/*.py"), *ROOT.glob("scripts/**/*.py")]


def commands() -> list[tuple[str, list[str]]]:
    """(script, flags) of each command; continued lines are indented or end in a backslash."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        text = re.sub(r"\n {10,}(?=--)", " ", text)
        for match in re.finditer(
            r"(?:python|torchrun [^\n`]*?) ((?:algos|scripts(?:/bench)?)/(?!X|mine\b)\w+\.py)([^\n`]*)", text
        ):
            flags = re.split(r"  |#|\(|\.\.\.|[\"`:]", match[2])[0]
            found.append((match[1], shlex.split(flags)))
    return found


def load(script: str):
    spec = importlib.util.spec_from_file_location(script.replace("/", "_")[:-3], ROOT / script)
    module = importlib.util.module_from_spec(spec)
    if str((ROOT / script).parent) not in sys.path:
        sys.path.append(str((ROOT / script).parent))  # as python has it, for scripts/bench/measure.py
    sys.modules[spec.name] = module  # tyro looks the comments of a nested dataclass up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "script, flags", commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_command_parses(script, flags):
    assert (ROOT / script).is_file()
    module = load(script)
    if hasattr(module, "Args"):
        tyro.cli(module.Args, args=flags)


def test_there_are_commands():
    assert len(commands()) >= 10


def test_links_exist():
    for page in TEXTS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_knows_how_long_the_files_are():
    rows = re.findall(r"^\| \[`(algos/\w+\.py)`\].*\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 8
    assert all(len((ROOT / path).read_text().splitlines()) == int(lines) for path, lines in rows), rows


@pytest.mark.parametrize("script, page", [("sibling_diffs", "README.md"), ("parity", "docs/parity.md")])
def test_generated_tables_are_up_to_date(script, page):
    module = load(f"scripts/{script}.py")
    assert f"{module.BEGIN}\n{module.table()}\n{module.END}" in (ROOT / page).read_text()


def test_the_baselines_table_is_what_the_curves_give():
    baselines = load("scripts/baselines.py")
    block = f"{baselines.BEGIN}\n{baselines.table(baselines.curves())}\n{baselines.END}"
    assert block in (ROOT / "README.md").read_text() and block in (ROOT / "baselines/README.md").read_text()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_each_algorithm_has_a_page_with_the_same_headings():
    names = {path.stem for path in ROOT.glob("algos/*.py")} - {"__init__"}
    pages = {path.stem: path.read_text() for path in ROOT.glob("docs/algorithms/*.md") if path.stem != "README"}
    assert set(pages) == names
    headings = {tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) for text in pages.values()}
    assert len(headings) == 1, headings


def test_each_metric_has_a_row_in_docs_metrics():
    documented = set(re.findall(r"^\| `([\w/*]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    sources = [*ROOT.glob("algos/*.py"), *ROOT.glob("common/**/*.py")]
    logged = {key for path in sources for key in re.findall(r'(?:add|peak|log)\(\s*"(\w+/\w+)"', path.read_text())}
    phases = {f"time/{key}" for path in sources for key in re.findall(r'\.time\("(\w+)"\)', path.read_text())}
    assert len(logged) > 20 and len(phases) > 5
    assert not (logged | phases) - documented


def test_the_lines_of_the_faq_are_those_that_the_code_prints():
    """Four words in a row of a quoted line are somewhere in the code, but for two places with a value between."""
    sources = [*ROOT.glob("common/**/*.py"), *ROOT.glob("algos/*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    lines = re.findall(r"^(?:error|warning)\[(\S+)\]: (.*)$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
    assert len(lines) >= 10
    for said, line in lines:
        phrases = re.findall(r"(?=\b((?:[a-z-]+ ){3}[a-z-]+)\b)", line)
        assert said == "bad-input" or f'"{said}"' in code, said
        missing = [phrase for phrase in phrases if phrase not in code]
        assert len(missing) < len(phrases) and len(missing) <= 2, missing
