"""Opens the built site in Chromium: python scripts/browse_site.py (build it first: python scripts/build_site.py)

On a phone's width in dark and on a desk's in light: pages open without an error in the console, nothing is wider than
the window, equations and curves are drawn, and search finds a metric, an error and an algorithm. Needs the packages
chromium and chromium-driver of Debian. --pictures FOLDER saves what it saw.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

import tyro


@dataclasses.dataclass
class Args:
    site: str = "runs/site/html"  # Folder of the built site.
    pictures: str = ""  # Folder for a picture of each page. Empty: none.


def main(args: Args) -> None:
    from website import browser  # here, because the flags can be parsed without requirements-docs.txt

    site = Path(args.site)
    if not browser.executable() or not shutil.which("chromedriver"):
        sys.exit("error: no Chromium or no chromedriver: apt-get install chromium chromium-driver")
    if not (site / "index.html").is_file():
        sys.exit(f"error: --site {site} has no index.html: run `python scripts/build_site.py`")
    problems = []
    with browser.served(site) as address, browser.chromium() as driver:
        for width, scheme in browser.WINDOWS:
            browser.resize(driver, width, scheme)
            for page in browser.PAGES:
                driver.get(address + page)
                problems += [f"/{page} at {width} pixels: {what}" for what in browser.page_problems(driver, width)]
                if args.pictures:
                    name = page.strip("/").replace("/", "-") or "index"
                    browser.save_picture(driver, Path(args.pictures) / f"{name}-{width}.png")
        problems += browser.search_problems(driver, address)
    if problems:
        sys.exit("\n".join(["error: the site has problems in Chromium:", *problems]))
    pages, windows, queries = len(browser.PAGES), len(browser.WINDOWS), len(browser.QUERIES)
    print(f"{pages} pages opened in {windows} windows, and {queries} searches found their page")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
