"""LaTeX to MathML, which browsers draw by themselves: the site needs no script and no font of another host for it."""

import re

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def rendered(text: str) -> str:
    """The page with each ```math block, which GitHub draws too, as MathML."""
    return BLOCK.sub(lambda block: f'<div class="equation" data-search-exclude>{mathml(block[1])}</div>', text)


def mathml(latex: str) -> str:
    return convert(latex, display="block")
