"""The documentation site: it builds without a warning from its lock, and has what its pages promise.

Tests of the built site are nightly. .github/workflows/site.yml builds it for each push.
"""

import csv
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import load

pytestmark = pytest.mark.slow
FILES = sorted(path.stem for path in ROOT.glob("algos/[!_]*.py"))


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python with requirements-docs.txt and nothing else, as the workflow has it."""
    folder = tmp_path_factory.mktemp("docs") / "venv"
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, folder], check=True)
    install = [*uv, "pip", "install", "--python", folder / "bin/python", "--requirement", "requirements-docs.txt"]
    result = subprocess.run(
        install, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"UV_HTTP_RETRIES": "10"}
    )
    if result.returncode and "CI" not in os.environ:
        pytest.skip(f"requirements-docs.txt cannot be installed here: {result.stderr[-300:]}")
    assert result.returncode == 0, result.stderr
    return folder / "bin/python"


@pytest.fixture(scope="module")
def site(python, tmp_path_factory) -> Path:
    """The folder of the built site. The build itself fails at a warning, and at a link that leads nowhere."""
    output = tmp_path_factory.mktemp("site")
    command = [python, ROOT / "scripts/build_site.py", "--output", output]
    environment = os.environ | {"PYTHONPATH": ""}  # nothing of the tests' own packages
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return output / "html"


def text_of(page: str) -> str:
    """HTML without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_an_algorithm_has_its_equation_and_its_curve(site, name):
    page = (site / f"algorithms/{name}/index.html").read_text()
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 1
    assert "\\" not in text_of("".join(re.findall(r"<math.*?</math>", page)))  # all LaTeX was understood
    figures = re.findall(r'data-task="(\w+)".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert figures
    for task, data in figures:
        for seed, columns in json.loads(data)["seeds"].items():
            with (ROOT / f"baselines/{task}/{name}/{seed}.csv").open() as file:
                rows = [row for row in csv.DictReader(file) if row["eval/accuracy"]]
            expected = [[int(row["step"]), float(row["eval/accuracy"])] for row in rows]
            assert columns["eval/accuracy"] == expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_an_algorithm_has_its_code_with_an_anchor_for_each_line(site, name):
    page = (site / f"algorithms/{name}/index.html").read_text()
    lines = re.findall(r'<span class="line" id="L(\d+)">(.*?)</span>(?=<span class="line"|</pre>)', page, re.DOTALL)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    assert [text_of(line) for _, line in lines] == (ROOT / f"algos/{name}.py").read_text().splitlines()


@pytest.mark.nightly
def test_a_diff_shows_both_files_and_marks_every_change(site):
    siblings = load("scripts/sibling_diffs.py").SIBLINGS
    cell = re.compile(r'<td class="number">(\d*)</td><td class="(\w+)">(?:<code>(.*?)</code>)?</td>')
    for name, (parent, _) in siblings.items():
        page = (site / f"algorithms/{name}/index.html").read_text()
        unmarked = []
        for side, file, mark in ((0, parent, "removed"), (1, name, "added")):
            source = (ROOT / f"algos/{file}.py").read_text().splitlines()
            top = next(number for number, line in enumerate(source) if line == '"""')  # where the docstring ends
            cells = [cell.findall(row)[side] for row in re.findall(r"<tr>(<td.*?)</tr>", page)]
            shown = [(int(number), kind, text_of(line)) for number, kind, line in cells if number]
            assert all(line == source[number - 1] for number, _, line in shown)
            marked = {number for number, kind, _ in shown if kind == mark}
            assert marked
            unmarked.append([line for number, line in enumerate(source) if number + 1 not in marked and number > top])
        assert unmarked[0] == unmarked[1], name  # without the marked lines both files are the same


@pytest.mark.nightly
def test_search_finds_each_metric_and_each_error_at_its_anchor(site):
    items = json.loads((site / "search.json").read_text())["items"]
    found = {item["location"]: text_of(item["title"]) for item in items}
    metrics = (ROOT / "docs/metrics.md").read_text().split("## In a tracker")[0]
    keys = re.findall(r"^\| `([^`]+)`", metrics, re.MULTILINE)
    assert len(keys) > 40
    for key in keys:
        anchor = load("scripts/website/anchors.py").metric(key)
        assert key in found[f"metrics/#{anchor}"].split(", ")
    codes = re.findall(r"^### `([\w-]+)`$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(codes) > 20
    assert all(found[f"errors/#{code}"] == code for code in codes)


@pytest.mark.nightly
def test_the_api_has_public_names_only(site):
    pages = [path.read_text() for path in site.glob("api/*/index.html")]
    names = {name for page in pages for name in re.findall(r'id="(common\.[\w.]+)"', page)}
    assert {"common.trainer.batching.split", "common.trainer.batching.Compute"} <= names
    assert not [name for name in names if "._" in name]
    page = (site / "api/trainer/index.html").read_text()
    assert "Micro-batches exist only to limit memory." in text_of(page)
    assert "a list of groups (P, [R_1 ... R_n])" in text_of(page)  # not taken for a link or for emphasis


def test_a_notebook_becomes_a_page(tmp_path):
    printed = {"output_type": "stream", "text": ["2\n", "3\n"]}
    value = {"output_type": "execute_result", "data": {"text/plain": ["5"]}}
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA\n", "text/plain": ["<Figure>"]}}
    text = "# First steps\n\n[![Open](https://x.y/z.svg)](https://x.y) Add."
    cells = [
        {"cell_type": "markdown", "source": [text]},
        {"cell_type": "code", "source": ["print(2)"], "outputs": [printed, value, picture]},
    ]
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": cells}))
    page = load("scripts/website/notebook.py").markdown(tmp_path / "x.ipynb")
    text = "# First steps\n\n[Open](https://x.y) Add."
    parts = [text, "```python\nprint(2)\n```", "```text\n2\n3\n```", "```text\n5\n```"]
    assert page == "\n\n".join([*parts, '<img alt="output" src="data:image/png;base64,AAAA">']) + "\n"


def test_every_page_is_in_the_navigation():
    """A page that nobody put there is found only by a search."""
    navigation = (ROOT / "scripts/website/zensical.toml").read_text()
    tomllib.loads(navigation.replace("API_PAGES", ""))
    for path in ROOT.glob("docs/**/*.md"):
        page = path.relative_to(ROOT / "docs").as_posix().replace("README.md", "index.md")
        assert f'"{page}"' in navigation, page


def test_the_check_of_links_finds_what_is_wrong(tmp_path):
    links = load("scripts/website/links.py")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.html").write_text('<h2 id="here">Here</h2>')
    good = '<a href="other/#here">1</a> <a href="https://arxiv.org">2</a> <img src="data:image/png;base64,AA">'
    (tmp_path / "index.html").write_text(good)
    assert links.problems(tmp_path) == []
    bad = {
        '<a href="gone/">1</a>': "no such file",
        '<a href="other/#gone">1</a>': "no such anchor",
        '<a href="#gone">1</a>': "no such anchor",
        '<img src="gone.svg">': "no such file",
        '<script src="https://cdn.example/x.js"></script>': "loads https://cdn.example/x.js",
        '<link rel="stylesheet" href="//fonts.example/x.css">': "loads //fonts.example/x.css",
    }
    for text, problem in bad.items():
        (tmp_path / "index.html").write_text(good + text)
        (found,) = links.problems(tmp_path)
        assert problem in found


@pytest.mark.nightly
def test_pages_open_in_a_browser(site, python):
    """Two widths, and the search: scripts/browse_site.py."""
    if not (shutil.which("chromium") or shutil.which("google-chrome")) or not shutil.which("chromedriver"):
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    command = [python, ROOT / "scripts/browse_site.py", "--site", site]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert result.returncode == 0, result.stdout + result.stderr
