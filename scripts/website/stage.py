"""The folder that Zensical builds: staged pages, assets and settings."""

import re
import shutil
from pathlib import Path

import plotly
import ziamath

from website import api, pages

ROOT = Path(__file__).parents[2]
WEBSITE = Path(__file__).parent


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
