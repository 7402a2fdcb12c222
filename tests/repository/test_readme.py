"""Every command in the README and in the docstrings of algos/ and scripts/ parses; every linked file exists."""

import ast
import json
import re
import shlex
import shutil
import statistics
import subprocess

import pytest
import tyro
from conftest import ROOT
from helpers import load

TEXTS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "llms.txt",
    ROOT / "baselines/README.md",
    ROOT / "baselines/performance/README.md",
    ROOT / "baselines/staleness/README.md",
    ROOT / "speedrun/README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
PAGES = [*TEXTS, *ROOT.glob("algos/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("speedrun/*.py")]


def commands() -> list[tuple[str, list[str]]]:
    """(script, flags) of each command; continued lines are indented or end in a backslash."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        text = re.sub(r"\n {10,}(?=--)", " ", text)
        for match in re.finditer(
            r"(?:python|torchrun [^\n`]*?) ((?:algos|scripts(?:/bench)?|speedrun)/(?!X|mine\b)\w+\.py)([^\n`]*)", text
        ):
            flags = re.split(r"  |#|\(|\.\.\.|[\"`:]", match[2])[0]
            found.append((match[1], shlex.split(flags)))
    return found


@pytest.mark.parametrize(
    "script, flags", commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_command_parses(script, flags):
    assert (ROOT / script).is_file()
    module = load(script)
    if hasattr(module, "Args") and flags != ["--help"]:  # tyro shows the help and exits
        tyro.cli(module.Args, args=flags)


def test_there_are_commands():
    assert len(commands()) >= 10


def test_links_exist():
    for page in TEXTS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_first_page_tells_how_long_the_code_is():
    """The lines of a file of algos/, and to a thousand those of all of common/ and of what grpo.py imports from it."""

    def lines(path) -> int:
        return path.read_text().count("\n")

    def thousands(paths) -> str:
        return f"{round(sum(map(lines, paths)) / 1000)},000 lines"

    imported = set()
    for node in ast.walk(ast.parse((ROOT / "algos/grpo.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("common"):
            place = ROOT / node.module.replace(".", "/")
            is_package = place.is_dir()
            imported |= {place / f"{name.name}.py" if is_package else place.with_suffix(".py") for name in node.names}
    sizes = sorted(map(lines, ROOT.glob("algos/[!_]*.py")))
    first_page = (ROOT / "README.md").read_text()
    assert f" {sizes[0]} to {sizes[-1]} lines" in first_page
    assert f"`common/`, about {thousands((ROOT / 'common').rglob('*.py'))}. `grpo.py` imports" in first_page
    assert len(imported) == 12 and f"twelve modules of it, about {thousands(imported)}" in first_page


def test_a_file_names_the_result_of_its_baseline():
    """The mean over the seeds, before and after. A file without a baseline claims no mean."""
    baselines = load("scripts/baselines.py")
    curves = baselines.curves("arithmetic")
    for path in sorted(ROOT.glob("algos/[!_]*.py")):
        result = path.read_text().partition("\nResult:")[2].partition('"""')[0]
        if path.stem not in curves:
            assert "seeds" not in result, path
            continue
        known = [[row["eval/accuracy"] for row in rows if "eval/accuracy" in row] for rows in curves[path.stem]]
        assert len(known) == 3
        for end in (0, -1):
            mean = statistics.mean(accuracies[end] for accuracies in known)
            assert f"{100 * mean:.1f} %" in result, path


@pytest.mark.parametrize("script, name", [("sibling_diffs", "siblings"), ("parity", "parity"), ("list_flags", "flags")])
def test_generated_tables_are_up_to_date(script, name):
    module = load(f"scripts/{script}.py")
    assert load("scripts/blocks.py").read(module.PAGE, name) == module.table()


def test_a_script_writes_its_part_of_a_page_and_nothing_else(tmp_path):
    blocks, page = load("scripts/blocks.py"), tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- a -->\nold\n<!-- /a -->\n\ntext <!-- b -->\nb\n<!-- /b -->\nend\n")
    blocks.write(page, "a", "new\nlines")
    assert page.read_text() == "# Page\n\n<!-- a -->\nnew\nlines\n<!-- /a -->\n\ntext <!-- b -->\nb\n<!-- /b -->\nend\n"
    assert blocks.read(page, "a") == "new\nlines" and blocks.read(page, "b") == "b"
    with pytest.raises(ValueError):
        blocks.write(page, "c", "nowhere")


def test_a_baseline_is_a_run_of_code_that_is_here():
    """Its run.json names a commit, without changes beside it. The history has that commit, where a clone has it all.

    One control ran before this was asked of it. Two commits were never published: baselines/README.md says more.
    """
    older = ROOT / "baselines/sums/rejection"
    lost = {"f5f44929f0d564d8feedf21e4921bc16f1bf582f", "db4aecbf46e5b4fd43951c828a01aff7a6a2480f"}
    assert all(commit[:7] in (ROOT / "baselines/README.md").read_text() for commit in lost)
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    for path in sorted(ROOT.glob("baselines/*/*/seed*.json")):
        if path.parent == older:
            continue
        run = json.loads(path.read_text())
        assert run["commit"] and not run["uncommitted_changes"], path
        if run["commit"] in lost:
            continue
        assert not whole or git("merge-base", "--is-ancestor", run["commit"], "HEAD").returncode == 0, path


@pytest.mark.parametrize("task", sorted(path.parent.name for path in ROOT.glob("baselines/*/curves.svg")))
def test_the_baselines_tables_and_curves_are_what_the_csvs_give(task, monkeypatch, tmp_path):
    baselines = load("scripts/baselines.py")
    for page in baselines.pages(task):
        assert load("scripts/blocks.py").read(page, f"baselines {task}") == baselines.page_table(task, page)
    shutil.copytree(ROOT / "baselines" / task, tmp_path / task, ignore=shutil.ignore_patterns("*.svg"))
    monkeypatch.setattr(baselines, "BASELINES", tmp_path)
    baselines.draw(task)
    if task == "sums":
        baselines.draw_front()
    committed = {path.name: path.read_text() for path in (ROOT / "baselines" / task).glob("*.svg")}
    assert {path.name: path.read_text() for path in (tmp_path / task).glob("*.svg")} == committed


@pytest.mark.parametrize(
    "values, form, shown",
    [
        # t of two degrees of freedom at 95 % is 4.303, so the half is 4.303 x 0.03 / sqrt(3) = 0.0745.
        ([0.50, 0.53, 0.56], ".1%", "53.0 ± 7.5%"),
        ([0.50, 0.53, 0.56], ".3f", "0.530 ± 0.075"),
        ([0.50, 0.56], ".1%", "53.0%"),  # t of one degree of freedom is 12.7, which says nothing
        ([0.5], ".1%", "50.0%"),
        ([1.0, 1.0, 1.0], ".1%", "100.0%"),  # equal seeds don't make a mean exact
    ],
)
def test_a_mean_over_three_seeds_has_an_interval(values, form, shown):
    assert load("scripts/baselines.py").mean_of(values, form) == shown


@pytest.mark.parametrize("task", sorted(path.parent.name for path in ROOT.glob("baselines/*/curves.svg")))
def test_a_baseline_is_the_command_that_the_scripts_have(task):
    """quickstart.sh takes its flags from scripts/baselines.py, and a report compares with the committed runs."""
    baselines = load("scripts/baselines.py")
    for run in baselines.curves(task):
        for described in baselines.described(task, run):
            before, now = described["argv"], baselines.command(task, run, described["seed"])
            if (task, run) in baselines.CONTROLS:  # whole commands
                now = baselines.commands(task, run, described["seed"])
                assert before == now, (task, run)
            else:
                assert before[0] == now[0], (task, run)
                assert baselines.by_flag(before[1:]) == baselines.by_flag(now[1:]), (task, run)
