"""The flags that every sampling algorithm shares (all but sft.py and dpo.py), and the command line of a file.

A file adds the hyperparameters of its algorithm in `class Args(flags.Flags)`. prepare.py and job.py read some of them,
too, so each file declares these with its own defaults: steps, prompts_per_step, group_size, max_response_tokens,
temperature, mini_batches, learning_rate, schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from tyro.conf import OmitArgPrefixes

from common import errors, placement
from common.data import arithmetic
from common.data.prompts import TrainSource
from common.preflight.docstrings import help_text
from common.preflight.ranges import Seed
from common.trainer.batching import Compute

EMBEDDED = {  # Defaults that all files share without --model: two-digit addition, learned on a CPU in minutes.
    "dataset": ("arithmetic",),
    "max_prompt_tokens": 64,
    "max_response_tokens": 48,
    "schedule": "linear",
    "warmup_steps": 2,
}


@dataclass(frozen=True)
class Saving:
    resume: str = ""  # Checkpoint folder to start from. "auto" takes the newest of --run-dir, if there is one.
    save_every: NonNegativeInt = 0  # Steps between checkpoints. 0: only after the last step and when asked to stop.
    keep_checkpoints: NonNegativeInt = 0
    """How many of the newest stay, besides the best by eval/accuracy. 0: all."""
    async_save: bool = False  # Write from a copy in host memory while the next step runs.
    dry_run: bool = False  # Check flags and data, print the plan, and leave before a model is loaded.


@dataclass
class Flags:
    """Flags of all algorithm files that sample. Each file adds the hyperparameters of its algorithm."""

    # model and data
    model: str = "embedded"  # Folder or Hub name. "embedded" is the small arithmetic model that is committed here.
    dataset: tuple[str, ...] = ("gsm8k",)  # arithmetic, sums, gsm8k, math, FILE, owner/name ... Several: each =WEIGHT.
    source: Annotated[TrainSource, OmitArgPrefixes] = TrainSource()
    environment: str = ""  # Answers the policy between its turns: calculator, guess, file.py:Class or openenv:URL.
    reward: tuple[str, ...] = ()
    """gsm8k, math, file.py:function, model:FOLDER, URL. Several: each =WEIGHT. Default: the environment's or gsm8k."""
    max_prompt_tokens: PositiveInt = 512  # Longest prompt. Longer ones are dropped.
    # rollout
    rollout_backend: Literal["vllm", "sglang", "hf"] = "vllm"
    """Engine that samples. sglang: servers at --rollout-urls. hf: transformers, slow, where vLLM is missing."""
    rollout_tp: PositiveInt = 1  # Number of ranks that share one engine by tensor parallelism.
    layout: Annotated[placement.Layout, OmitArgPrefixes] = placement.Layout()
    # computing
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of forward and backward; masters are float32. auto: bfloat16 on a GPU, on a CPU where it is faster."""
    compute: Annotated[Compute, OmitArgPrefixes] = Compute()
    offload: Literal["none", "others", "all"] = "none"
    """Keep weights in host memory while they are not used: none, others (all but the policy), or all."""
    # bookkeeping
    seed: Seed = 0  # Seed of sampling, of the order of the prompts, and of new adapters.
    run_dir: str = ""  # Folder that the run writes to. Default: runs/NAME-DATE-TIME, with the name of this file.
    eval_every: NonNegativeInt = 0
    """Steps between greedy evaluations. 0: only before the first and after the last step."""
    saving: Annotated[Saving, OmitArgPrefixes] = Saving()
    rollouts_every: PositiveInt = 10  # Steps between files in rollouts/.
    max_logprob_gap: NonNegativeFloat = 0.0
    """A larger mean |trainer - engine| of the log-probs, in nats, stops the run. 0: 0.001 or, in bfloat16, 0.1."""
    track: Literal["none", "wandb", "tensorboard", "mlflow", "trackio", "swanlab"] = "none"
    """Tracker for metrics, in addition to metrics.jsonl. It stays offline unless its own variables say otherwise."""


@dataclass
class Selection:
    """The flags that choose a set of defaults. They are read before the others."""

    model: str = ""
    environment: str = ""


def launch(main: Callable, flags: type, embedded: dict, description: str) -> None:
    """Parse the command line and call main(args). Without --model, `embedded` replaces defaults of `flags`. A built-in
    --environment, or an OpenEnv server, also becomes the default of --dataset. `description` is the file's docstring.
    """
    # Defaults depend on --model and --environment, so these two are read before tyro knows the defaults.
    selection, _ = tyro.cli(Selection, add_help=False, return_unknown_args=True)
    defaults = {}
    if selection.model in ("", "embedded"):
        defaults |= embedded
    # What a server of OpenEnv shows at a reset is the prompt.
    if selection.environment in arithmetic.WITH_ENVIRONMENT or selection.environment.startswith("openenv:"):
        defaults["dataset"] = (selection.environment,)
    args = tyro.cli(flags, default=flags(**defaults), description=help_text(description))
    errors.launch(main, args)
