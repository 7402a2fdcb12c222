"""The environments that come with the repository, small enough for the embedded model.

common/data/tasks.py has their problems, and the demonstrations for algos/sft.py.
"""

import random
import re

from common.rollout.environments import Environment, Problem, Result, Step
from common.rollout.environments.tools import Tools

# `guess` gives up after so many turns. Halving the interval of 15 numbers takes 4.
TURNS = 6


class Calculator(Tools):
    """Products that the embedded model cannot compute, and a tool that can: mul(347,29) is answered by 10063."""

    max_calls = 2

    def mul(self, a: int, b: int) -> int:
        """The product of two whole numbers."""
        return a * b

    def score(self) -> Result:
        """1 if the last number of the turn without a call is right."""
        number = last_number(self.answer)
        right = float(number is not None and int(number) == int(self.problem.answer))
        return Result(right, right, number)


class Guess(Environment):
    """Find a number in the interval "10 to 24?". The answer to a guess is "more" or "less", so halving is optimal.

    The number is drawn from the problem's seed, so it differs from step to step.
    """

    def reset(self, problem: Problem) -> None:
        """Draw the number."""
        low, high = map(int, problem.meta["prompt"].rstrip("?").split(" to "))
        self.secret = random.Random(problem.seed).randint(low, high)
        self.halvings = (high - low + 1).bit_length()
        self.turns = 0
        self.found = False

    def step(self, text: str) -> Step:
        """Compare the last number of the turn. A hit, a turn without a number and the last turn end the episode."""
        self.turns += 1
        number = last_number(text)
        guess = None if number is None else int(number)
        self.found = guess == self.secret
        if self.found or guess is None or self.turns == TURNS:
            return Step(done=True)
        return Step("more" if guess < self.secret else "less")

    def score(self) -> Result:
        """1 for a hit within as many turns as halving ever takes, 1/3 less for each further turn, 0 without a hit.

        A lucky guess earns nothing extra. Only a plan that always suffices earns 1 every time.
        """
        # For example 10 to 24: 15 numbers, so 4 turns always suffice. The 5th costs a third.
        extra_turns = max(0, self.turns - self.halvings)
        score = 1 - extra_turns / 3 if self.found else 0.0
        return Result(score, float(score == 1), None, {"number": self.secret})


def last_number(text: str) -> str | None:
    """The last whole number of a text, as it stands there; None without one."""
    numbers = re.findall(r"-?\d{1,100}", text)
    return numbers[-1] if numbers else None
