"""Python files as HTML: with numbered lines that have anchors, and next to their sibling with the changes marked."""

import ast
import difflib
import functools
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sibling_diffs import SIBLINGS

ROOT = Path(__file__).parents[2]
CONTEXT = 3  # unchanged lines around a change


@functools.cache
def coloured(path: Path) -> list[str]:
    """One piece of HTML per line of the file. No tag spans two lines."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    return highlight(path.read_text(), lexer, HtmlFormatter(nowrap=True)).removesuffix("\n").split("\n")


def code(path: Path) -> str:
    """The whole file. Line 120 has the anchor L120."""
    lines = []
    for number, line in enumerate(coloured(path), 1):
        link = f'<a href="#L{number}" title="line {number}" data-line="{number}"></a>'
        lines.append(f'<span class="line" id="L{number}">{link}{line}</span>')
    name = path.relative_to(ROOT)
    return f'<div class="listing highlight" data-search-exclude title="{name}"><pre>{"".join(lines)}</pre></div>'


def sibling(name: str) -> str:
    """What the file changes in its sibling. A file without a sibling names those that start from it."""
    if name not in SIBLINGS:
        children = [f"[`{child}.py`]({child}.md#diff)" for child, (parent, _) in SIBLINGS.items() if parent == name]
        return f"`{name}.py` has no sibling to be compared with. These files start from it: {', '.join(children)}."
    parent, what = SIBLINGS[name]
    old, new = ROOT / f"algos/{parent}.py", ROOT / f"algos/{name}.py"
    told = f"From [`{parent}.py`]({parent}.md#code) on the left to `{name}.py` on the right: {what}."
    return f"{told} Unchanged lines and the docstring at the top are left out.\n\n{side_by_side(old, new)}"


def side_by_side(old: Path, new: Path) -> str:
    """A table: number and line of the old file, number and line of the new one. Marked are lines that differ."""
    old_top, before = after_docstring(old)
    new_top, after = after_docstring(new)
    rows = []
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        rows.append('<tr class="gap"><td colspan="4">...</td></tr>')
        for tag, old_start, old_end, new_start, new_end in group:
            for row in range(max(old_end - old_start, new_end - new_start)):
                left = cell(old, old_top + old_start + row, old_top + old_end, tag, "removed")
                right = cell(new, new_top + new_start + row, new_top + new_end, tag, "added")
                rows.append(f"<tr>{left}{right}</tr>")
    columns = '<colgroup><col class="narrow"><col><col class="narrow"><col></colgroup>'
    head = f'<tr><th colspan="2">{old.name}</th><th colspan="2">{new.name}</th></tr>'
    body = "".join(rows)
    table = f'<table class="changes">{columns}<thead>{head}</thead><tbody>{body}</tbody></table>'
    return f'<div class="diff highlight" data-search-exclude>{table}</div>'


def after_docstring(path: Path) -> tuple[int, list[str]]:
    """The number of lines that the docstring at the top takes, and all lines after them."""
    text = path.read_text()
    top = ast.parse(text).body[0].end_lineno
    return top, text.splitlines()[top:]


def cell(path: Path, line: int, end: int, tag: str, mark: str) -> str:
    """Number and text of one line, or an empty cell beyond the end of this side's lines."""
    if line >= end:
        return '<td class="number"></td><td class="none"></td>'
    kind = "same" if tag == "equal" else mark
    return f'<td class="number">{line + 1}</td><td class="{kind}"><code>{coloured(path)[line]}</code></td>'
