"""A run of algos/grpo.py as scripts/staleness.py has it, in this process: staleness.py STALENESS FLAG ..."""

import sys

from helpers import load

staleness = load("scripts/staleness.py")
staleness.learn(int(sys.argv[1]), str(staleness.ROOT / "algos/grpo.py"), sys.argv[2:])
