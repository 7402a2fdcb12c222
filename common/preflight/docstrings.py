"""A file's docstring on the command line. Imports nothing, so that a script which needs no torch starts at once."""

import re


def help_text(docstring: str) -> str:
    """A file's docstring as tyro's `description`: indented lines keep their line breaks, and the rest is reflowed.

    tyro joins lines that begin with a letter to the line before, which may be a formula or a command.
    """
    joined = re.sub(r"^(\S.*)\n(?=\S)", r"\1 ", docstring, flags=re.MULTILINE)
    return re.sub(r"^( .*)\n(?=\S)", r"\1\n\n", joined, flags=re.MULTILINE)
