"""LaTeX to MathML, which browsers draw by themselves: the site needs no script and no font of another host for it."""

import re

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def rendered(text: str) -> str:
    """The page with each ```math block, which GitHub draws too, as MathML."""
    return BLOCK.sub(lambda block: f'<div class="equation" data-search-exclude>{mathml(block[1])}</div>', text)


def mathml(latex: str) -> str:
    """MathML, with two spaces mended that browsers set otherwise than TeX: around < in an index, and after log."""
    text = convert(latex, display="block")
    text = text.replace("<mo>&#x0003C;</mo>", '<mo lspace="0" rspace="0">&#x0003C;</mo>')
    return text.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.167em" />')
