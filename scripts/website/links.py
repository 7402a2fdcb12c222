"""Every link of the built site, checked: the file exists, it has the anchor, and nothing comes from another host."""

import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "manifest"}  # what <link> fetches


class Page(HTMLParser):
    """The anchors of a page, where it links, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in LOADED:
            self.loaded.append(values["href"])
        if values.get("src"):
            self.loaded.append(values["src"])


def problems(folder: Path, root: str = "/") -> list[str]:
    """A line for each link without a target, and for each file of another host that a page loads.

    root: the path of the site's address. A page of errors may be shown anywhere, so its links begin with that path.
    """
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        found += [f"{name}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = destination(folder, root, path, unquote(parts.path))
            if not target.is_file():
                found.append(f"{name}: {url}: no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {url}: no such anchor")
    return found


def destination(folder: Path, root: str, page: Path, link: str) -> Path:
    """The file that a link of a page means; a folder means its index.html."""
    if not link:
        return page
    if link.startswith("/"):
        path = folder / link.removeprefix(root)
    else:
        path = Path(os.path.normpath(page.parent / link))
    return path / "index.html" if path.is_dir() else path
