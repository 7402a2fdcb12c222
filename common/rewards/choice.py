r"""--reward choice: questions with lettered options, such as MMLU, ARC and GPQA (common/data/choices.py).

A response is right if it gives the letter of the right option, or its text, in one of these forms. For the options
A) Rome, B) Paris:

    \boxed{B}                                also \boxed{\text{B}}, \boxed{(B)}, \boxed{B) Paris}, \boxed{Paris}
    Answer: B                                also Final answer: (B), **Answer:** B. Paris, Answer: Paris, Answer: b
    <answer>B</answer>                       with the same contents
    The answer is (B)                        also the correct option is B, The answer is **B**, The answer is Paris
    **B**                                    also **(B)**, **B) Paris**, at the end of a line or in the last line
    B                                        or B. or B) or (B) or (B) Paris, as the last line

- The last of these marks counts. A \boxed{}, "Answer:" or <answer> with anything else in it is an answer, too, and a
  wrong one. "The answer is not clear" and **Note** are no marks.
- Two letters in the mark that counts are wrong: "Answer: A or B", "Answer: B) Rome", a last line "**A** and **B**".
- Letters beyond the options do not count. Nor does an A that is an article, as in "The answer is A good idea", nor the
  pronoun I, nor a letter that is denied, as in "B is not right". In brackets, before punctuation or alone, A and I are
  letters. A lower-case letter counts only alone in a box, in <answer> or behind "Answer:", or in round brackets.
- Lines that begin with different letters are a list of options. In a list, neither bold letters nor the last line are
  an answer.
- Nothing inside of <think>...</think> counts.
- An option with the same text as the right one is right.
"""

import re

from common.data import choices
from common.data.choices import LETTERS, plain
from common.rewards.grading import TAIL_CHARACTERS, Item, Result, final_box
from common.rewards.text import with_think, without_thinking

ANSWER = re.compile(r"(?i)\banswer[*_`]*\s*[:：][\s*_`]*|<answer>\s*")
PHRASE = re.compile(r"(?i)\b(?:answer|option|choice)\s+(?:is|was|must be|should be|would be)\b\s*:?\s*")
BOLD = re.compile(r"\*\*(?=\S)([^*\n]{1,300})\*\*")
# Only the last phrases and bold texts count: MOST_PHRASES of each, in the last PHRASE_CHARACTERS of a response.
PHRASE_CHARACTERS = 20_000
MOST_PHRASES = 50
CLOSED = re.compile(r"[\s.,:;!)*_]*")  # what may stand behind a bold letter that ends its line
BULLET = re.compile(r"[\s>#*-]*")
# A letter in brackets, or a capital one that is not a part of a word or a formula.
LEADING = re.compile(
    r"(?:(?i:option|choice|letter|answer)\s+)?(?:[(\[]\s*(?P<inside>[A-Za-z])\s*[)\]]|(?P<bare>[A-Z])(?![\w'’+#^=/-]|\.[A-Za-z]\.))"
)
ALONE = re.compile(r"(?:(?i:option|choice|letter)\s+)?[(\[]?\s*([A-Za-z])\s*[)\]]?\s*[.,:;!)]*")
SEPARATORS = re.compile(r"[\s.):,;*|–—-]*")
# Behind an A or I that is a letter, and neither an article nor a pronoun. "I was" and "I as" begin a sentence.
REASON = {
    "A": re.compile(r"\s+(?:because|since|which|as|is|was)\b"),
    "I": re.compile(r"\s+(?:because|since|which|is)\b"),
}
# Behind a letter that is no answer: B is not right, B was wrong. But "B is not wrong" and "B can't be beaten" are.
DENIED = re.compile(
    r"(?i)[.)]?,?\s+(?:(?:is|was)\s+(?:wrong|incorrect|false)\b"
    r"|(?:(?:is|was)(?:n['’]?t|\s+not|\s+never)|can(?:\s*not|['’]t)\s+be)\b"
    r"(?!\s+(?:wrong|incorrect|false|beaten|denied|doubted)\b"
    r"|\s+(?:only|just|merely)\s+(?!wrong|incorrect|false)))"
)
# Another letter behind a first one: "B or C", "A/B", "B, C", "B, maybe C".
ANOTHER = re.compile(
    r"[\s).\]]*(?:\\?[,/;&+|→、，]|=>|(?i:\band\b|\bor\b|\bvs\b\.?))[\s~]*"
    r"(?i:(?:and|or|else|also|perhaps|maybe|possibly|alternatively|option)\s+)*"
    r"(?:\(\s*(?P<inside>[A-Za-z])\s*\)|(?P<bare>[B-HJ-Z](?![\w'’])|[AI](?![\w'’]|\s+[a-z])))"
)
LISTED = re.compile(r"^[ \t>#*-]*\(?([A-Z])[).:]", re.MULTILINE)


class ChoiceReward:
    """One of the rewards of common/rewards/__init__.py. score = acc."""

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        return [grade(item) for item in items]

    def fault_of(self, prompt) -> str:
        """Why the responses to a prompt cannot be graded, or ""."""
        try:
            question = choices.read(prompt.meta, prompt.meta.get("prompt", prompt.text), prompt.answer)
        except ValueError as error:
            return f"{error}, which --reward choice needs; --columns answer=COLUMN if another column has the answer"
        return "" if question.shown else "the prompt does not show the options, which --reward choice grades"


def grade(item: Item) -> Result:
    """Both score and acc are None if the row's options or its answer cannot be read."""
    try:
        question = choices.read(item.meta, item.meta.get("prompt", item.prompt), item.answer)
    except ValueError as error:
        return Result(None, None, None, {"error": str(error)})
    letter = final_letter(without_thinking(with_think(item)), question.options)
    if letter is None:
        return Result(0.0, 0.0)
    chosen = question.options[LETTERS.index(letter)]
    right = float(plain(chosen) == plain(question.options[question.right]))
    return Result(right, right, letter)


def final_letter(response: str, options: list[str]) -> str | None:
    """The letter of the option that a response chooses. None if there is none, or more than one."""
    response = re.sub(r"\\boxed\s+\{", r"\\boxed{", response)
    marks = [
        *answers_in(response),
        *phrases_in(response),
        *bold_in(response, options),
        *last_line_of(response, options),
    ]
    for _, letters, decides in sorted(marks, key=lambda mark: mark[0], reverse=True):
        if not isinstance(letters, set):
            letters = read(letters, options, lower=decides)
        if letters or decides:
            return min(letters) if len(letters) == 1 else None
    return None


# The marks of a response. Each is (place, text behind it or letters in it, whether it decides even without a letter).


def answers_in(response: str) -> list[tuple]:
    """The last "Answer:" or <answer>, and the last box."""
    marks = []
    found = list(ANSWER.finditer(response))
    if found:
        last = found[-1]
        text = response[last.end() : last.end() + TAIL_CHARACTERS]
        text = text.split("</answer>")[0] if last[0].startswith("<") else text.split("\n")[0]
        marks.append((last.end(), text, True))
    box = final_box(response)
    if box:
        marks.append((box[0], box[1][:TAIL_CHARACTERS], True))
    return marks


def phrases_in(response: str) -> list[tuple]:
    """ "The answer is ..."."""
    last = list(PHRASE.finditer(response, tail_of(response)))[-MOST_PHRASES:]
    return [(mark.end(), response[mark.end() : mark.end() + TAIL_CHARACTERS].split("\n")[0], False) for mark in last]


def bold_in(response: str, options: list[str]) -> list[tuple]:
    """Bold letters at the end of a line, and all of those in the last line together."""
    is_list = len(set(LISTED.findall(response, tail_of(response))) & set(LETTERS[: len(options)])) > 1
    begin_of_last_line = response.rstrip().rfind("\n") + 1
    marks = []
    in_last_line: set[str] = set()
    for bold in list(BOLD.finditer(response, tail_of(response)))[-MOST_PHRASES:]:
        letters = read_line(bold[1], options)
        line_start = response.rfind("\n", 0, bold.start()) + 1
        begins_line = BULLET.fullmatch(response, line_start, bold.start())
        if not letters or (begins_line and is_list):
            continue
        end = response.find("\n", bold.end())
        ends_line = CLOSED.fullmatch(response, bold.end(), len(response) if end < 0 else end)
        if bold.start() >= begin_of_last_line:
            in_last_line |= letters
            marks.append((bold.start(), in_last_line, False))
        elif ends_line:
            marks.append((bold.start(), letters, False))
    return marks


def tail_of(response: str) -> int:
    """Where the end of a response begins."""
    return max(0, len(response) - PHRASE_CHARACTERS)


def last_line_of(response: str, options: list[str]) -> list[tuple]:
    """The last line, if it is an option and not the end of a list of them."""
    lines = response.rstrip()[-TAIL_CHARACTERS:].split("\n")
    letters = read_line(lines[-1], options)
    if not letters:
        return []
    for line in lines[-2:-1]:
        letters = letters | read_line(line, options)
    return [(len(response.rstrip()) - len(lines[-1]), letters, False)]


# What stands in a mark


def read(text: str, options: list[str], lower: bool) -> set[str]:
    """The letters that a text behind a mark gives. lower: a lower-case letter counts if it is alone."""
    text = unwrapped(text)
    alone = ALONE.fullmatch(text)
    if alone and (lower or alone[1].isupper() or text[0] in "(["):
        name = alone[1].upper()
        if name in LETTERS[: len(options)]:
            return {name}
    equal = option_of(text, options)
    if equal:
        return {equal}
    first = LEADING.match(text)
    if not first:
        return set()
    name = (first["inside"] or first["bare"]).upper()
    if name not in LETTERS[: len(options)]:
        return set()
    own = options[LETTERS.index(name)]
    rest = text[first.end() :]
    body = rest[SEPARATORS.match(rest).end() :]
    has_own = bool(own) and plain(body).startswith(plain(own))
    second = ""
    behind = rest
    if body.casefold().startswith(own.casefold()):
        behind = body[len(own) :]
    else:
        alone_too = ALONE.fullmatch(body)  # the B of (A)(B) or A, option b; not the a of "B - a"
        counts = alone_too and (alone_too[1].isupper() or body[: alone_too.start(1)].strip())
        second = option_of(body, options) or (alone_too[1].upper() if counts else "")
    also = ANOTHER.match(behind)
    if also:
        second = (also["inside"] or also["bare"]).upper()
    if second and second in LETTERS[: len(options)]:
        return {name, second}
    # A good idea, I think.
    is_word = first["bare"] in REASON and re.match(r"\s+\w", rest) and not REASON[first["bare"]].match(rest)
    return set() if (is_word and not has_own) or DENIED.match(behind) else {name}


def read_line(line: str, options: list[str]) -> set[str]:
    """The letters of a line, or of a bold text, that is an option: B, (B), B., B) Paris. Two if they contradict."""
    text = unwrapped(line[BULLET.match(line).end() :])
    alone = ALONE.fullmatch(text)
    if alone:
        return {alone[1]} & set(LETTERS[: len(options)])
    first = re.match(r"\(([A-Z])\)|\[([A-Z])\]|([A-Z])[).:](?=\s)", text)
    if not first:
        return set()
    name = first[1] or first[2] or first[3]
    given = option_of(text[first.end() :].strip(), options)
    return {name, given} if given and name in LETTERS[: len(options)] else set()


def unwrapped(text: str) -> str:
    """The text without Markdown, dollars and LaTeX's boxes and fonts."""
    for _ in range(3):
        text = choices.WRAPPER.sub(r"\1", text)
    text = choices.with_words(text)
    text = re.sub(r"\\[()\[\]]|[*`$]|__", "", text)
    return text.strip().strip("\"'“”‘’").strip()


def option_of(text: str, options: list[str]) -> str:
    """The letter of the option whose text this is, perhaps with other words behind a comma or a full stop, or ""."""
    candidates = [text, re.split(r"\.\s|[,;]\s|\s\(|\s(?:because|since)\s", text, maxsplit=1)[0]]
    for candidate in map(plain, candidates):
        for letter, option in zip(LETTERS, options):
            if candidate and candidate == plain(option):
                return letter
    return ""
