"""Builds the documentation site: python scripts/build_site.py (needs: pip install -r requirements-docs.txt)

Stages the pages (scripts/website/pages.py), lets Zensical make HTML of them, in which a warning is an error, and checks
every link, anchor and file of the result (scripts/website/links.py). To read it:
python -m http.server --directory runs/site/html
"""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import plotly
import tyro
import ziamath
from website import api, links, pages

ROOT = Path(__file__).parents[1]
WEBSITE = ROOT / "scripts/website"


@dataclasses.dataclass
class Args:
    output: str = "runs/site"  # Folder of the staged pages (docs) and of the site (html). It is emptied first.


def main(args: Args) -> None:
    output = Path(args.output).resolve()
    shutil.rmtree(output, ignore_errors=True)
    stage(output)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=output, check=True)
    problems = links.problems(output / "html", urlsplit(pages.addresses()["Documentation"]).path)
    if problems:
        sys.exit("\n".join(["error: links of the site lead nowhere:", *problems]))
    print(f"site: {output / 'html/index.html'}")


def stage(output: Path) -> None:
    docs = output / "docs"
    site = pages.Site(docs)
    site.stage()
    for page, text in api.pages().items():
        site.write(page, text)
    assets = docs / "assets"
    shutil.copytree(WEBSITE / "assets", assets)
    shutil.copyfile(Path(plotly.__file__).parent / "package_data/plotly.min.js", assets / "plotly.min.js")
    shutil.copyfile(Path(ziamath.__file__).parent / "fonts/STIXTwoMath-Regular.ttf", assets / "STIXTwoMath-Regular.ttf")
    (output / "zensical.toml").write_text(settings(docs))


def settings(docs: Path) -> str:
    """zensical.toml with its blanks filled, without the lines of `nav` whose page is not there."""
    lines = []
    for line in (WEBSITE / "zensical.toml").read_text().splitlines():
        page = re.search(r'"(\S+\.md)"', line)
        if not page or (docs / page[1]).exists():
            lines.append(line)
    urls = pages.addresses()
    blanks = {
        "API_PAGES": ",\n    ".join(f'{{ "{title}" = "{page}" }}' for page, title in api.TITLES.items()),
        "ADDRESS_OF_SITE": urls["Documentation"],
        "ADDRESS_OF_REPOSITORY": urls["Repository"],
        "FOLDER": str(ROOT),
    }
    text = "\n".join(lines) + "\n"
    for blank, value in blanks.items():
        text = text.replace(blank, value)
    return text


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
