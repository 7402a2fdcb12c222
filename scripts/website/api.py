"""The API pages: docstrings and signatures of common/, a page for each package. mkdocstrings reads the source."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# In the order in which the layers import each other (tests/repository/test_structure.py), the loop's own first.
PACKAGES = {
    "run": "The steps of a run: sampling, evaluation, metrics, checkpoints, reports",
    "preflight": "What is checked and computed before the first step: flags, folders, memory",
    "trainer": "Loading a model, packing batches, and computing log-probs",
    "rollout": "The engines that sample, and the environments that answer them",
    "rewards": "The rewards that `--reward` names, and the workers that grade",
    "data": "Reading data sets, and turning rows into prompts as token ids",
    "processes": "Worker processes that can be killed, and the sandbox for programs",
}
TOP = ("placement", "weight_sync", "errors")
TITLES = {"api/common.md": "API: common"} | {f"api/{name}.md": f"API: common.{name}" for name in PACKAGES}


def modules(package: str) -> list[str]:
    """Names of a package's modules that have a docstring or code, sub-packages included."""
    found = []
    for path in sorted((ROOT / "common" / package).rglob("*.py")):
        if path.read_text().strip():
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def pages() -> dict[str, str]:
    """Page -> its Markdown. `::: name` is where mkdocstrings puts a module."""
    rows = "\n".join(f"| [`common.{name}`]({name}.md) | {what} |" for name, what in PACKAGES.items())
    first = "# API: common\n\nThe plumbing that the algorithms share. The text is that of the docstrings.\n\n"
    first += f"| package | what is in it |\n|---|---|\n{rows}\n"
    found = {"api/common.md": first + "".join(f"\n::: common.{name}\n" for name in TOP)}
    for name, what in PACKAGES.items():
        text = f"# API: common.{name}\n\n{what}.\n"
        found[f"api/{name}.md"] = text + "".join(f"\n::: {module}\n" for module in modules(name))
    return found
