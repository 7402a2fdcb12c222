"""Are two expressions equal? math-verify's verify(), with what it gets wrong put right. Importing it loads sympy.

- Tiny numbers: verify() rounds decimals to six places and takes a difference below 1e-15 for 0. 1/2^99 would equal
  1/2^98. Here two numbers must also agree relative to their size.
- Inequalities: x < 3 equals (-oo, 3), whichever of the two is the reference, and "x < 1 or x > 2" equals the union. A
  list of two numbers is no interval.
- Letters in roots are positive if both expressions have such a root: sqrt(50x^3) equals 5x sqrt(2x). But sqrt(x^2) does
  not equal x: nothing says that x is positive.
"""

import re

import sympy
from math_verify import grader, verify
from math_verify.utils import timeout
from sympy import Basic, Eq, FiniteSet, Float, Integer, Symbol

# How far two numbers may differ, relative to the larger one. Unless a number is tiny, a decimal of six places has at
# least three digits, such as 0.001235 for 1/810.
DECIMAL_TOLERANCE = 1e-3
EXACT_TOLERANCE = 1e-12
DIGITS = 30  # of the values that are compared

numeric_equality = grader.sympy_numeric_eq


def equal(gold, answer, gold_text: str, text: str, seconds: int) -> bool:
    """Whether an answer equals the reference. Both as math-verify has read them: an expression, or a string.

    Raises TimeoutException. Main thread only.
    """
    if isinstance(gold, Basic) and isinstance(answer, Basic):
        gold, answer = timeout(seconds)(comparable)(gold, answer, gold_text, text)
        if mixes_list_and_inequality(gold, answer):
            return False
    elif joins_differ(gold_text, text):  # the strings that math-verify keeps have a comma in the place of the word
        return False
    compare = {"allow_set_relation_comp": True, "timeout_seconds": seconds, "raise_on_error": True}
    if verify(gold, answer, **compare):
        return True
    letters = positive_letters(gold, answer)
    return bool(letters) and verify(gold.xreplace(letters), answer.xreplace(letters), **compare)


def close_numbers(a, b, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison of two numbers, but not for numbers that are far apart relative to their size."""
    return numeric_equality(a, b, float_rounding, numeric_precision) and not far_apart(a, b)


# math-verify calls it for each number in a set, a matrix or an interval, too.
grader.sympy_numeric_eq = close_numbers


def far_apart(a, b) -> bool:
    """True if two numbers certainly differ. False also for what is no number."""
    if not isinstance(a, Basic) or not isinstance(b, Basic) or a.free_symbols or b.free_symbols:
        return False
    # A percent sign may be left out: 50% is right for 50.
    if all(isinstance(grader.get_pct_val(number, number), Integer) for number in (a, b)):
        return grader.get_pct_val(a, a) != grader.get_pct_val(b, b)
    x, y = a.doit().evalf(DIGITS), b.doit().evalf(DIGITS)
    if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
        return False
    # A value without a reliable digit, as that of an expression that is 0.
    if any(isinstance(value, Float) and value._prec == 1 for value in (x, y)):
        return False
    tolerance = DECIMAL_TOLERANCE if a.has(Float) or b.has(Float) else EXACT_TOLERANCE
    return bool(abs(x - y) > tolerance * max(abs(x), abs(y)))


def comparable(gold: Basic, answer: Basic, gold_text: str, text: str) -> tuple[Basic, Basic]:
    """Both, with inequalities as the set that they mean if the other is a set."""
    # math-verify compares two lists of inequalities part by part, and takes "or" for "and".
    differ = joins_differ(gold_text, text)
    gold_is_list, answer_is_list = isinstance(gold, FiniteSet), isinstance(answer, FiniteSet)
    if differ or not answer_is_list:
        gold = joined(gold, join_of(gold_text))
    if differ or not gold_is_list:
        answer = joined(answer, join_of(text))
    return named_set(gold, answer), named_set(answer, gold)


def join_of(text: str) -> type | None:
    """sympy's class for what the words of a text do with several inequalities; None without such a word."""
    words = set(re.findall(r"\\(?:lor|vee|land|wedge)\b|\b(?:or|and)\b", text))
    if not words:
        return None
    return sympy.Union if words <= {"or", r"\lor", r"\vee"} else sympy.Intersection


def joins_differ(text: str, other: str) -> bool:
    """Whether one text has "or" where the other has "and"."""
    joins = join_of(text), join_of(other)
    return None not in joins and joins[0] is not joins[1]


def joined(relations: Basic, join: type | None) -> Basic:
    """`x < 1 or x > 2` as a union, and `x > 1 and x < 2` as an intersection. Anything else as it is."""
    if not isinstance(relations, FiniteSet) or join is None:
        return relations
    parts = relations.args
    if not all(grader.is_relation(part) and not isinstance(part, Eq) for part in parts):
        return relations
    return join(*(grader.unwrap_fcs(part).as_set() for part in parts))


def named_set(equation: Basic, other: Basic) -> Basic:
    """The set of `x \\in [0, 1]`, which math-verify reads as an equation, if the other is an inequality or a set."""
    is_membership = (
        isinstance(equation, Eq) and isinstance(equation.rhs, sympy.Set) and isinstance(equation.lhs, Symbol)
    )
    return equation.rhs if is_membership and not isinstance(other, Eq) else equation


def mixes_list_and_inequality(a: Basic, b: Basic) -> bool:
    """math-verify would take the numbers 2, 5 for the ends of 2 < x < 5."""
    for one, other in ((a, b), (b, a)):
        is_list = isinstance(one, FiniteSet | sympy.Tuple) and not any(grader.is_relation(part) for part in one.args)
        is_inequality = grader.is_relation(other) and not grader.is_equation(other)
        if is_list and is_inequality and len(one.args) > 1:
            return True
    return False


def positive_letters(a, b) -> dict[Symbol, Symbol]:
    """Positive letters to put in the place of those in the roots of two expressions. Empty if only one has a root."""
    if not (isinstance(a, Basic) and isinstance(b, Basic)) or a.has(sympy.Abs) or b.has(sympy.Abs):
        return {}
    rooted = [letters_in_roots(expression) for expression in (a, b)]
    if not all(rooted):
        return {}
    return {letter: Symbol(letter.name, positive=True) for letter in set.union(*rooted)}


def letters_in_roots(expression: Basic) -> set[Symbol]:
    letters: set[Symbol] = set()
    for power in expression.atoms(sympy.Pow):
        if power.exp.is_Rational and not power.exp.is_Integer:
            letters |= power.base.free_symbols
    return letters
