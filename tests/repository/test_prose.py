"""Pages read easily: 16 words in an average sentence, and never more than 35 in one."""

import re
import statistics

import pytest
from conftest import ROOT
from markdown_it import MarkdownIt

PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("baselines/**/README.md")),
    ROOT / "speedrun/README.md",
]
AVERAGE, LONGEST = 16, 35  # words


def paragraphs(page: str) -> list[str]:
    """The prose of a page: no code blocks, tables or headings, and one word for each piece of code in a line."""
    found = []
    skipped = 0  # how many tables and headings we are in
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        if token.type in ("table_open", "heading_open"):
            skipped += 1
        elif token.type in ("table_close", "heading_close"):
            skipped -= 1
        elif token.type == "inline" and not skipped:
            words = {"code_inline": "code", "softbreak": " ", "image": ""}
            found.append("".join(words.get(piece.type, piece.content) for piece in token.children))
    return found


def sentences(page: str) -> list[str]:
    """A colon ends a sentence too, if a capital letter follows."""
    return [
        sentence
        for paragraph in paragraphs(page)
        for sentence in re.split(r"(?<=[.!?])[\"')]*\s+|(?<=:)\s+(?=[A-Z])", paragraph)
        if re.search(r"\w", sentence)
    ]


def count_words(sentence: str) -> int:
    return len(re.findall(r"\w[\w'’.,%/-]*", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page):
    found = sentences(page.read_text())
    too_long = [sentence for sentence in found if count_words(sentence) > LONGEST]
    assert not too_long, "\n".join(too_long)
    assert statistics.mean(map(count_words, found)) <= AVERAGE


def test_what_counts_as_a_sentence():
    page = (
        "# A heading. It has no sentence\n\n"
        "One `x.y` two. Three [four](five.md)\nsix!\n\n"
        "- seven: Eight\n\n| nine | ten |\n|---|---|\n| a | b |\n\n"
        "```bash\necho eleven\n```\n"
    )
    assert [count_words(sentence) for sentence in sentences(page)] == [3, 3, 1, 1]
