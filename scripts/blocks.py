"""Parts of a page that a script writes. Two comments enclose such a part: <!-- claims --> and <!-- /claims -->."""

from pathlib import Path


def read(page: Path, name: str) -> str:
    """What stands between the two comments."""
    return split(page, name)[1].removeprefix("\n").removesuffix("\n")


def write(page: Path, name: str, text: str) -> None:
    """Put text between the two comments. The rest of the page stays as it is."""
    before, _, after = split(page, name)
    page.write_text(f"{before}\n{text}\n{after}")


def split(page: Path, name: str) -> tuple[str, str, str]:
    """The page up to the part, the part, and what follows it. The comments belong to the first and the last.

    Raises ValueError unless the page has each comment once.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = page.read_text().split(begin)
    part, after = rest.split(end)
    return before + begin, part, end + after
