"""The algorithm files, and how a test that runs all of them runs each. Imported by tests and by tests/workers."""

import importlib
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALGORITHM_FILES = sorted(path.stem for path in (ROOT / "algos").glob("[!_]*.py"))
# Those that sample and grade. SFT and DPO do neither.
ALGORITHMS = [name for name in ALGORITHM_FILES if "group_size:" in (ROOT / f"algos/{name}.py").read_text()]
# Flags that switch on a part of an algorithm, or that a step of few prompts needs.
SWITCHES = {"kl_coef": 0.1, "lam": 0.95, "baseline": "group", "gen_prompts": 8, "overlong_cache": 4}


def short_run(name: str) -> dict:
    """Flags for a short run of the embedded task, with everything switched on that the file has."""
    known = importlib.import_module(f"algos.{name}").Args.__dataclass_fields__
    return {flag: value for flag, value in SWITCHES.items() if flag in known}


def once(load):
    """prompts.load() that tokenizes each data set once for the runs of a process. Each run gets prompts of its own."""
    known = {}

    def loaded(dataset, source, split, tokenizer, *given):
        key = (dataset, repr(source), split, tokenizer.name_or_path, *given)
        if key not in known:
            known[key] = load(dataset, source, split, tokenizer, *given)
        return [replace(prompt, ids=list(prompt.ids), meta=dict(prompt.meta)) for prompt in known[key]]

    return loaded
