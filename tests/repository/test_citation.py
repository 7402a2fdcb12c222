"""What others cite: one version, one title, one address in all files that name them."""

import datetime
import json
import re
import tomllib

import yaml
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
ZENODO = json.loads((ROOT / ".zenodo.json").read_text())
BIBTEX = re.search(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def bibtex(field: str) -> str:
    """A field of the README's entry, without its braces."""
    return re.search(rf"\b{field}\s*= \{{+(.*?)\}}+,?\n", BIBTEX)[1]


def test_all_files_have_one_version_title_and_licence():
    newest = re.search(r"^## (\d\S*) \((.+)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {PROJECT["version"], CITATION["version"], ZENODO["version"], bibtex("version"), newest[1]} == {newest[1]}
    assert CITATION["date-released"] == newest[2]
    assert {CITATION["title"], ZENODO["title"], bibtex("title")} == {CITATION["title"]}
    assert {PROJECT["license"], CITATION["license"], ZENODO["license"], bibtex("license")} == {"MIT"}


def test_all_files_have_one_address():
    urls = PROJECT["urls"]
    assert {CITATION["repository-code"], bibtex("url")} == {urls["Repository"]}
    assert CITATION["url"] == urls["Documentation"]


def test_the_citation_has_what_its_readers_need():
    """GitHub and Zenodo refuse a file without the first four, and without a date nobody knows which code it was."""
    for key in ("cff-version", "message", "title", "authors", "abstract", "type", "keywords"):
        assert CITATION[key], key
    assert datetime.date.fromisoformat(CITATION["date-released"]).year == int(bibtex("year"))
    names = {author["name"] for author in CITATION["authors"]}
    assert names == {creator["name"] for creator in ZENODO["creators"]} == {bibtex("author")}
