"""Docstrings are plain text, with formulas and tables in indented blocks. mkdocstrings takes them for Markdown.

So this extension of griffe, which zensical.toml names, makes Markdown of them that looks like the text.
"""

import re

import griffe

SPECIAL = re.compile(r"(`[^`]*`)|([\\*_\[\]<>#|~$])")  # code between backticks stays; these characters mean themselves


class PlainText(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Lines that are indented by four stay as they are, a block of code. All others are escaped."""
    lines: list[str] = []
    in_block = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if line.strip() and indented != in_block:
            in_block = indented
            if lines and lines[-1]:
                lines.append("")  # Markdown knows a block by the blank line before it
        lines.append(line if in_block else SPECIAL.sub(lambda match: match[1] or f"\\{match[2]}", line))
    return "\n".join(lines)
