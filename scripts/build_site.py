"""Builds the documentation site: python scripts/build_site.py (needs: pip install -r requirements-docs.txt)

Stages the pages (scripts/website/pages.py), lets Zensical make HTML of them, in which a warning is an error, and checks
every link, anchor and file of the result (scripts/website/links.py). To read it:
python -m http.server --directory runs/site/html
"""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import tyro


@dataclasses.dataclass
class Args:
    output: str = "runs/site"  # Its folders docs (staged pages) and html (the site) are made anew.


def main(args: Args) -> None:
    from website import links, pages, stage  # here, because the flags can be parsed without requirements-docs.txt

    output = Path(args.output).resolve()
    for name in ("docs", "html"):
        shutil.rmtree(output / name, ignore_errors=True)
    stage.stage(output)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=output, check=True)
    problems = links.problems(output / "html", urlsplit(pages.addresses()["Documentation"]).path)
    if problems:
        sys.exit("\n".join(["error: links of the site lead nowhere:", *problems]))
    print(f"site: {output / 'html/index.html'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
