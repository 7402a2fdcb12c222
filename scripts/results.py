"""What an evaluation writes down, and the comparison of two of them on the same problems.

A number can be quoted if someone else can get it again. So a result has what it depends on: prompt, grader, sampling,
lengths, data, model and commit. compare() refuses two results if problems, prompt, graders, n, temperature, longest
response or environment differ. Another `--max-prompt-tokens` matters only if it drops other problems.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from common.data import json_lines, sources, templates
from common.data.prompts import INSTRUCTIONS, Prompt, suite_prompt
from common.errors import BadInput
from common.rewards import judge
from common.rewards.schema import parse_as
from common.run import estimates

# Settings that two results must share. Two models may have other chat templates, and the seed is a draw like any other.
SHARED = ("environment", "template", "n", "temperature", "max_response_tokens")


class Problems(BaseModel):
    """A value for each problem, in the order of the data. None: nobody could grade its responses."""

    id: list[str]
    greedy: list[float | None]  # 1 if the greedy response is right
    right: list[int | None]  # how many of the n sampled responses are right; empty without sampled ones


class Result(BaseModel):
    """What a comparison reads of a result."""

    name: str
    model: str
    reward: list[str]
    reward_files: dict[str, str]
    data: str
    settings: dict[str, Any]
    problems: Problems
    commit: str | None


@dataclass(frozen=True)
class Measure:
    """One number for each problem, whose mean is reported."""

    values: np.ndarray  # (N,), NaN where nobody could grade
    independent: int = 1  # as in estimates.interval()

    @property
    def graded(self) -> np.ndarray:
        return self.values[~np.isnan(self.values)]

    @property
    def mean(self) -> float:
        return float(self.graded.mean())

    def interval(self) -> list[float]:
        return rounded(*estimates.interval(self.graded.clip(0, 1), self.independent))


def rounded(*numbers) -> list[float]:
    return [round(float(number), 4) for number in numbers]


def measures(problems: Problems, n: int) -> dict[str, Measure]:
    """The reported accuracies: "greedy", "sampled" (which is mean@n), and "pass@k" for some k above 1."""
    found = {"greedy": Measure(values=np.array(problems.greedy, dtype=float))}
    right = np.array(problems.right, dtype=float)
    graded = ~np.isnan(right)
    for k in estimates.ks(n):
        values = np.full(len(right), np.nan)
        values[graded] = estimates.pass_at_k(n, right[graded].astype(int), k)
        name = "sampled" if k == 1 else f"pass@{k}"
        found[name] = Measure(values=values, independent=n // k)
    return found


def title(name: str, n: int) -> str:
    """The usual name of a measure, for people."""
    return f"mean@{n}" if name == "sampled" else name


def in_words(name: str, result: dict) -> str:
    """A result as one line to quote: each accuracy with its interval, in percent."""
    n = result["settings"]["n"]
    parts = []
    for measure, (low, high) in result["interval"].items():
        parts.append(f"{title(measure, n)} {100 * result[measure]:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
    truncated = max(result["truncated"].values())
    cut_off = f"up to {100 * truncated:.1f} % of responses cut off"
    text = f"{name}: {', '.join(parts)}; {result['prompts']} problems, {cut_off}"
    worst = max(result["ungraded"].values())
    return f"{text}, {worst} left out, as they could not be graded" if worst else text


def template_of(spec: str, template: str, tokenizer) -> Any:
    """The text or the messages around each question. template: --template."""
    around = templates.read_template(template, tokenizer) or suite_prompt(spec)
    return around or "{prompt}" + INSTRUCTIONS.get(sources.kind(spec), "")


def fingerprint(prompts: list[Prompt]) -> str:
    """SHA-256 of the questions as they are asked, and of all that graders read. Models have it in common.

    Token ids are left out: two models may have other tokenizers and chat templates.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        row = json.dumps([prompt.messages, prompt.answer, prompt.meta], sort_keys=True, default=str)
        digest.update(row.encode("utf-8", "surrogatepass") + b"\n")
        for image in getattr(prompt.ids, "images", []):
            digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()


def file_hashes(graders: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of the file behind each reward or environment that has one: its name alone doesn't say how it grades.

    For judge:FILE.json it covers the template beside that file, too.
    """
    hashes = {}
    for grader in graders:
        name = grader.removeprefix("judge:")
        file = Path(name.rpartition(":")[0] if ".py:" in name else name)
        if file.suffix not in (".py", ".json") or not file.is_file():
            continue
        digest = hashlib.sha256(file.read_bytes())
        if grader.startswith("judge:"):
            digest.update(judge.read_settings(file).template.encode())
        hashes[grader] = digest.hexdigest()
    return hashes


def read(path: str) -> dict[str, Result]:
    """Name of a data set -> its result, of a file that --output has written. Raises BadInput."""
    written = json_lines.read_object(Path(path))
    try:
        results = [parse_as(Result, each) for each in written["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: is no file of scripts/evaluate.py --output: {error}") from None
    return {result.name: result for result in results}


def check_same(first: Result, second: Result, paths: tuple[str, str]) -> None:
    """Refuse results of other problems, graders or settings. Raises BadInput that names all differences."""
    different = []
    for name in ("reward", "reward_files"):
        if getattr(first, name) != getattr(second, name):
            different.append(f"{name} {getattr(first, name)} and {getattr(second, name)}")
    for name in SHARED:
        if name == "temperature" and not first.settings.get("n"):
            continue  # greedy alone has none
        one, other = (json.dumps(result.settings.get(name))[:200] for result in (first, second))
        if one != other:
            different.append(f"{name} {one} and {other}")
    if first.data != second.data:
        different.append("the problems, or how they are asked")
    elif len(first.problems.greedy) != len(second.problems.greedy):
        different.append("the number of problems")  # only if somebody has edited a file
    if different:
        raise BadInput(f"{paths[0]} and {paths[1]} cannot be compared: {first.name} differs in {'; '.join(different)}")


def compare(paths: tuple[str, str]) -> list[dict]:
    """For each data set in both files: both means and the difference, first minus second, with its interval.

    Raises BadInput if the results are not of the same problems, graded and sampled in the same way.
    """
    first, second = (read(path) for path in paths)
    shared = [name for name in first if name in second]
    if not shared:
        raise BadInput(f"{paths[0]} has {', '.join(first)}, and {paths[1]} has {', '.join(second)}: nothing to compare")
    compared = []
    for name in shared:
        check_same(first[name], second[name], paths)
        n = first[name].settings["n"]
        ones, others = measures(first[name].problems, n), measures(second[name].problems, n)
        # A problem that only one of the models has grades for says nothing about the other.
        values = np.array([each.values for each in (*ones.values(), *others.values())])
        both = ~np.isnan(values).any(0)
        if not both.any():
            raise BadInput(f"{paths[0]} and {paths[1]}: {name} has no problem that both have grades for")
        row: dict[str, Any] = {"name": name, "models": [first[name].model, second[name].model], "n": n}
        row["commits"] = [first[name].commit, second[name].commit]
        row["problems"] = int(both.sum())
        for measure, one in ones.items():
            other = others[measure]
            mine, theirs = one.values[both].clip(0, 1), other.values[both].clip(0, 1)
            row[measure] = {
                "first": rounded(mine.mean(), *estimates.interval(mine, one.independent)),
                "second": rounded(theirs.mean(), *estimates.interval(theirs, other.independent)),
                "difference": rounded(
                    mine.mean() - theirs.mean(), *estimates.difference(mine, theirs, one.independent)
                ),
            }
        compared.append(row)
    return compared


def comparison_table(compared: list[dict]) -> str:
    """The comparison as text, in percent."""
    lines = []
    for row in compared:
        first, second = row["models"]
        lines.append(f"{row['name']}, {row['problems']} problems: A is {first}, B is {second}")
        lines.append(f"  {'%':8} {'A':^20}   {'B':^20}   {'A - B':^20}")
        for measure, cells in row.items():
            if not isinstance(cells, dict):
                continue
            texts = []
            for mean, low, high in cells.values():
                texts.append(f"{100 * mean:5.1f} [{100 * low:5.1f}, {100 * high:5.1f}]")
            low, high = cells["difference"][1:]
            verdict = "" if low <= 0 <= high else "  differ"
            lines.append(f"  {title(measure, row['n']):8} {'   '.join(texts)}{verdict}")
        if row["commits"][0] != row["commits"][1]:
            lines.append("  measured with two commits, whose graders may differ")
    return "\n".join(lines)
