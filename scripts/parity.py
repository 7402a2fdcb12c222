"""Our advantages, losses and gradients beside those of verl 0.9.1 and TRL 1.16, on the same random batch.

python scripts/parity.py             # the table from what was recorded (tests/parity.json), written into docs/parity.md
python scripts/parity.py --record    # fetches both wheels, runs their own code, and records what it returns

Their packages are imported from wheels without dependencies. Called are verl's trainer/ppo/core_algos.py, and the
methods of TRL's GRPOTrainer, RLOOTrainer and DPOTrainer on a stand-in that hands them the batch's log-probs. Packages
that they import and never call here (ray, tensordict, ...) are replaced by stand-ins as well. Neither has PRIME.
"""

import ast
import dataclasses
import importlib
import importlib.machinery
import inspect
import json
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import tyro

sys.path.append(str(Path(__file__).parent))
import variants

from algos import cispo, dapo, dpo, dr_grpo, grpo, gspo, opd, ppo, reinforce_pp, remax, rloo
from common.trainer.distillation import ChunkedKL
from common.trainer.logits import LogitShape

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests/parity.json"
PEERS = ("verl==0.9.1", "trl==1.16.0")
BEGIN, END = "<!-- parity -->", "<!-- /parity -->"  # the table between them is generated
G, LOW, HIGH, BETA, LONGEST = 4, 0.2, 0.28, 0.04, 16
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Args:
    record: bool = False  # run the peers' code again


def batch() -> Tensors:
    """12 responses of 3 to 9 tokens to 3 prompts, float64. Ratios reach past both clips, and past 3."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    lengths = torch.randint(3, 10, (12,), generator=generator)
    mask = torch.arange(9)[None] < lengths[:, None]
    old = -draw(12, 9).abs() - 0.1
    change = 0.4 * draw(12, 9)
    change[:, 1] = 1.5  # a ratio of 4.5 in each response
    return {
        "mask": mask,
        "old": old * mask,
        "logprobs": (old + change) * mask,
        "ref": (old + 0.2 * draw(12, 9)) * mask,
        "scores": draw(12).round(decimals=1),
        "greedy": draw(3).round(decimals=1).repeat_interleave(G),
        "values": draw(12, 9) * mask,
        "old_values": draw(12, 9) * mask,
        "logits": draw(12, 9, 7),
        "teacher_logits": draw(12, 9, 7),
    }


def with_gradient(of: str, function) -> torch.Tensor:
    """Value of function(tensor of the batch) and its gradient with respect to that tensor, as one vector."""
    leaf = batch()[of].clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return torch.cat([loss.detach()[None].double(), leaf.grad.flatten().double()])


def ours() -> Tensors:
    """Each line of the table, by our functions."""
    b = batch()
    mask, old, ref, scores = b["mask"], b["old"], b["ref"], b["scores"]
    tokens, clip = float(mask.sum()), {"clip_low": LOW, "clip_high": HIGH}
    z = grpo.compute_advantages(scores, G)
    token_rewards = remax.reward_tokens(scores, old, ref, mask, BETA)
    advantages, returns = ppo.compute_advantages(token_rewards, b["values"], mask, 1.0, 0.95)

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        """The heads are identities: hidden states are logits."""
        student, teacher, head = logits[mask].float(), b["teacher_logits"][mask].float(), torch.eye(7)
        targets, shape = torch.zeros(len(student), dtype=torch.long), LogitShape(0.9)
        found, *_ = ChunkedKL.apply(student, head, targets, shape, teacher, head, shape)
        return opd.vocabulary_loss(found, torch.ones_like(found, dtype=torch.bool), denominator=tokens)

    whitened = lambda rewards, baseline: reinforce_pp.whiten(
        reinforce_pp.compute_advantages(rewards, scores, mask, G, baseline), mask
    )
    loss = lambda algorithm, *given, **keywords: with_gradient(
        "logprobs", lambda logprobs: algorithm.policy_loss(logprobs, old, *given, mask, **clip, **keywords)
    )
    return {
        "grpo advantages": z,
        "grpo advantages, eps 1e-4": grpo.compute_advantages(scores, G, eps=1e-4),
        "grpo advantages, 16 x 0.7 in float32": grpo.compute_advantages(torch.full((16,), 0.7), 16),
        "dr_grpo advantages": dr_grpo.compute_advantages(scores, G),
        "rloo advantages": rloo.compute_advantages(scores, G),
        "rloo advantages with KL": rloo.compute_advantages(scores - BETA * rloo.sequence_kl(old, ref, mask), G),
        "remax token rewards": token_rewards,
        "remax advantages": remax.compute_advantages(token_rewards, b["greedy"], mask),
        "reinforce_pp advantages with KL": whitened(token_rewards, "none"),
        "reinforce_pp advantages, group": whitened(remax.reward_tokens(scores, old, None, mask, 0.0), "group"),
        "ppo returns": returns,
        "ppo advantages, whitened": ppo.whiten(advantages, mask),
        "grpo loss": loss(grpo, None, z, kl_coef=0.0, denominator=12),
        "grpo loss with KL": loss(grpo, ref, z, kl_coef=BETA, denominator=12),
        "gspo loss": loss(gspo, None, z, kl_coef=0.0, denominator=12),
        "cispo loss": loss(cispo, None, z, kl_coef=0.0, denominator=tokens),
        "cispo loss, weights up to 1.28": with_gradient(
            "logprobs",
            lambda logprobs: cispo.policy_loss(
                logprobs, old, None, z, mask, clip_low=1.0, clip_high=HIGH, kl_coef=0.0, denominator=tokens
            ),
        ),
        "dr_grpo loss": loss(dr_grpo, None, z, kl_coef=0.0, denominator=12 * LONGEST),
        "dapo loss": loss(dapo, z, clip_dual=3.0, denominator=tokens),
        "dapo loss, no dual clip": loss(dapo, z, clip_dual=1e9, denominator=tokens),
        "rloo loss": loss(rloo, z, denominator=tokens),
        "dpo loss": with_gradient(
            "logprobs",
            lambda logprobs: dpo.dpo_loss(
                dpo.implicit_rewards(logprobs, (ref * mask).sum(1).view(-1, 2), mask, 0.1), 0.0
            ).mean(),
        ),
        "opd loss over the vocabulary": with_gradient("logits", divergence),
        "ppo loss": loss(ppo, z[:, None].expand(12, 9), denominator=tokens),
        "ppo value loss": with_gradient(
            "values",
            lambda values: ppo.value_loss(values, b["old_values"], returns, mask, clip=0.2, denominator=tokens),
        ),
    }


def our_variants() -> Tensors:
    """Lines of the table for docs/variants.md. The engine's log-probs are those of the reference."""
    b = batch()
    mask, old, sampled, scores = b["mask"], b["old"], b["ref"], b["scores"]
    z, now = grpo.compute_advantages(scores, G), b["logprobs"]
    icepop, sequence, geometric = map(variants.load, ("icepop", "sequence-weights", "geometric-mask"))
    clip_cov, kl_cov = variants.load("clip-cov"), variants.load("kl-cov")
    kept = clip_cov.keep_tokens(clip_cov.covariance(now, z, mask), mask, share=1.0)
    paying = kl_cov.highest(kl_cov.covariance(now, z, mask), mask, share=0.2)
    assert 0 < (kept == 0).sum() < mask.sum() and paying.sum() == int(0.2 * mask.sum())

    def loss(algorithm, **keywords) -> torch.Tensor:
        settings = {"clip_low": LOW, "clip_high": HIGH, "kl_coef": 0.0, "denominator": 12, **keywords}
        function = lambda logprobs: algorithm.policy_loss(logprobs, old, None, z, mask, **settings)
        return with_gradient("logprobs", function)

    return {
        "variant lite-ppo advantages": variants.load("lite-ppo").compute_advantages(
            scores, torch.ones(12, dtype=torch.bool), G, eps=1e-4
        ),
        "variant opo advantages": variants.load("opo").compute_advantages(scores, mask.sum(1), G),
        "variant gmpo loss": loss(variants.load("gmpo")),
        "variant sapo loss": loss(variants.load("sapo")),
        "variant dppo loss": loss(variants.load("dppo"), denominator=float(mask.sum())),
        "variant clip-cov gradient": loss(clip_cov, token_weights=kept)[1:],
        "variant kl-cov loss": loss(kl_cov, paying=paying),
        "variant icepop weights": icepop.rollout_weights(old, sampled, mask, 1.2) * mask,
        "variant sequence weights": sequence.rollout_weights(old, sampled, mask, 1.1) * mask,
        "variant geometric mask": geometric.rollout_weights(old, sampled, mask, 1.05) * mask,
    }


DIFFERENT = {  # "our line|what the peer calls it" -> why it differs; every other line is equal to 1e-6
    "grpo advantages, 16 x 0.7 in float32|grpo": "equal rewards: exactly 0 here, rounding over eps there",
    "grpo loss|vanilla, its defaults": "defaults there: token mean, dual clip at 3",
    "dr_grpo loss|vanilla, seq-mean-token-sum-norm": "no factor given: the padded width of the batch there",
    "grpo advantages|scale_rewards group": "eps 1e-6 here, 1e-4 there",
    "rloo loss|RLOOTrainer": "token ratios and a token mean here, one ratio a sequence there",
}


def verl_lines() -> Tensors:
    """The verl lines by verl's own functions."""
    import numpy as np

    core = import_with_stand_ins("verl.trainer.ppo.core_algos")
    corrections = import_with_stand_ins("verl.trainer.ppo.rollout_corr_helper")
    weights = corrections.compute_rollout_correction_weights
    core.ActorConfig = Settings  # gspo's loss asks for the class of its config
    b = batch()
    mask, old, ref, scores = b["mask"].double(), b["old"], b["ref"], b["scores"]
    index, z = np.arange(12) // G, grpo.compute_advantages(b["scores"], G)[:, None] * mask

    def place(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # on the last token, as verl does
        return torch.zeros_like(mask).scatter(1, mask.sum(1, keepdim=True).long() - 1, scores[:, None])

    def loss(
        mode: str, c: float, scale=None, kl: bool = False, policy_loss=core.compute_policy_loss_vanilla
    ) -> torch.Tensor:
        info = {"loss_scale_factor": scale} if scale else {}
        config = Settings(
            clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=c, global_batch_info=info,
            tau_pos=1.0, tau_neg=1.05, policy_loss=Settings(
                clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=0.2, ppo_kl_coef=1.0
            ),
        )  # fmt: skip

        def function(logprobs):
            out = policy_loss(old, logprobs, z, mask, mode, config)[0]
            return out + BETA * core.agg_loss(core.kl_penalty(logprobs, ref, "low_var_kl"), mask, mode) if kl else out

        return with_gradient("logprobs", function)

    token_rewards = core.compute_rewards(place(scores, mask), old, ref, BETA)
    white, returns = core.compute_gae_advantage_return(token_rewards, b["values"], mask, 1.0, 0.95)
    same = torch.full((16,), 0.7)
    first = lambda pair, mask=mask: (pair[0] * mask).sum(1) / mask.sum(1)  # constant along the row
    sevens = core.compute_grpo_outcome_advantage(place(same, torch.ones(16, 2)), torch.ones(16, 2), np.zeros(16))
    outcome = lambda function, **keywords: first(function(place(scores, mask), mask, index, **keywords))
    return {
        "grpo advantages|grpo": outcome(core.compute_grpo_outcome_advantage),
        "grpo advantages, 16 x 0.7 in float32|grpo": first(sevens, torch.ones(16, 2)),
        "dr_grpo advantages|grpo, norm_adv_by_std_in_grpo=False": outcome(
            core.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False
        ),
        "rloo advantages|rloo": outcome(core.compute_rloo_outcome_advantage),
        "remax token rewards|compute_rewards": token_rewards * mask,
        "remax advantages|remax": core.compute_remax_outcome_advantage(token_rewards, b["greedy"], mask)[0],
        "reinforce_pp advantages with KL|reinforce_plus_plus": core.compute_reinforce_plus_plus_outcome_advantage(
            token_rewards, mask, Settings(gamma=1.0)
        )[0],
        "reinforce_pp advantages, group|reinforce_plus_plus_baseline": (
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(place(scores, mask), mask, index)[0]
        ),
        "variant opo advantages|opo": outcome(core.compute_opo_outcome_advantage),
        "variant gmpo loss|geo_mean": loss("token-mean", 3.0, policy_loss=core.compute_policy_loss_geo_mean),
        "variant sapo loss|sapo": loss("seq-mean-token-mean", 3.0, policy_loss=core.compute_policy_loss_sapo),
        "variant dppo loss|dppo_tv": loss("token-mean", 20.0, policy_loss=core.compute_policy_loss_dppo_tv),
        "variant clip-cov gradient|clip_cov, all of the band": loss(
            "seq-mean-token-mean", 3.0, policy_loss=core.compute_policy_loss_clip_cov
        )[1:],
        "variant kl-cov loss|kl_cov": loss("seq-mean-token-mean", 3.0, policy_loss=core.compute_policy_loss_kl_cov),
        "variant icepop weights|rollout_is token, 0.5_1.2": weights(old - ref, mask, "token", "0.5_1.2")[0],
        "variant sequence weights|rollout_is sequence": weights(old - ref, mask, "sequence", 1.1)[0] * mask,
        "variant geometric mask|rollout_rs seq_mean_k1": corrections.compute_rollout_rejection_mask(
            old - ref, mask, "seq_mean_k1", f"{1 / 1.05}_1.05"
        )[0],
        "ppo returns|gae": returns * mask,
        "ppo advantages, whitened|gae": white * mask,
        "grpo loss|vanilla, seq-mean-token-mean, c = 1e9": loss("seq-mean-token-mean", 1e9),
        "grpo loss with KL|the same, plus low_var_kl": loss("seq-mean-token-mean", 1e9, kl=True),
        "grpo loss|vanilla, its defaults": loss("token-mean", 3.0),
        "gspo loss|gspo": loss("seq-mean-token-mean", 1e9, policy_loss=core.compute_policy_loss_gspo),
        "cispo loss|cispo": loss("token-mean", 1e9, policy_loss=core.compute_policy_loss_cispo),
        "dr_grpo loss|vanilla, seq-mean-token-sum-norm, factor K": loss("seq-mean-token-sum-norm", 1e9, LONGEST),
        "dr_grpo loss|vanilla, seq-mean-token-sum-norm": loss("seq-mean-token-sum-norm", 1e9),
        "dapo loss|vanilla, token-mean, c = 3": loss("token-mean", 3.0),
        "rloo loss|vanilla, token-mean, c = 1e9": loss("token-mean", 1e9),
        "ppo loss|vanilla, token-mean, c = 1e9": loss("token-mean", 1e9),
        "ppo value loss|compute_value_loss": with_gradient(
            "values", lambda values: core.compute_value_loss(values, returns, b["old_values"], mask, 0.2)[0]
        ),
    }


class Settings(dict):
    """A config that answers both config.key and config.get(key)."""

    __getattr__ = dict.__getitem__


def import_with_stand_ins(name: str):
    """Import a module. Packages that it imports and that are not installed are replaced: they are never called."""
    absent: list[str] = []
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name in absent or error.name == name:
                raise
            absent.append(error.name)
            stand_in = MagicMock(__path__=[], __spec__=importlib.machinery.ModuleSpec(error.name, None))
            sys.modules[error.name] = stand_in
            for loaded in [module for module in sys.modules if module.partition(".")[0] == name.partition(".")[0]]:
                del sys.modules[loaded]


def statements(method, first: str, last: str) -> list[ast.stmt]:
    """The statements of a method from the one that starts with `first` to the one that starts with `last`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body
    starts = [ast.unparse(statement) for statement in body]
    begin = next(i for i, text in enumerate(starts) if text.startswith(first))
    end = max(i for i, text in enumerate(starts) if text.startswith(last))
    return body[begin : end + 1]


def run(code: list[ast.stmt], method, **names) -> torch.Tensor:
    """Execute statements of a method with these names; returns `advantages`."""
    names = {**method.__globals__, **names}
    exec(compile(ast.Module(code, []), method.__qualname__, "exec"), names)
    return names["advantages"]


def trl_lines() -> Tensors:
    """The TRL lines by the trainers' own methods."""
    from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

    distill = import_with_stand_ins("trl.experimental.gold.gold_trainer").GOLDTrainer.generalized_jsd_loss
    b = batch()
    mask, old, ref, scores = b["mask"].double(), b["old"], b["ref"], b["scores"]
    z = grpo.compute_advantages(scores, G)
    make = GRPOTrainer._generate_and_score_completions
    grouped = statements(make, "if self.multi_objective_aggregation", "if self.multi_objective_aggregation")
    rloo_make = RLOOTrainer._generate_and_score_completions
    leave_one_out = statements(rloo_make, "if self.beta != 0.0:\n    per_token_kl", "advantages = torch.nan_to_num")

    def trainer(**settings) -> SimpleNamespace:
        args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        settings = {
            "beta": 0.0, "epsilon_low": LOW, "epsilon_high": HIGH, "importance_sampling_level": "token",
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "args": args,
            "_entropy_bonus_enabled": False, "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1,
            "model": SimpleNamespace(training=True), "max_completion_length": LONGEST, "accelerator": accelerator,
            "_metrics": defaultdict(lambda: defaultdict(list)), **settings,
        }  # fmt: skip
        return SimpleNamespace(**settings)

    def advantages(scale: str) -> torch.Tensor:
        settings = {"multi_objective_aggregation": "sum_then_normalize", "reward_weights": torch.ones(1)}
        names = {"rewards_per_func": scores[:, None], "unscorable_mask": torch.zeros(12, dtype=torch.bool)}
        self = SimpleNamespace(**settings, scale_rewards=scale)
        return run(grouped, make, self=self, num_generations=G, device="cpu", **names)

    def loss(method, **settings) -> torch.Tensor:
        def function(logprobs):
            self = trainer(**settings)
            self._get_per_token_logps_and_entropies = lambda *given, **keywords: (logprobs, torch.zeros(12, 9), None)
            prompt = torch.zeros(12, 1, dtype=torch.long)
            inputs = {
                "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(), "completion_mask": mask,
                "advantages": z, "old_per_token_logps": old, "old_logps": (old * mask).sum(1),
                "ref_per_token_logps": ref, "num_items_in_batch": mask.sum(),
            }  # fmt: skip
            return method(self, None, inputs)

        return with_gradient("logprobs", function)

    def preferences(logprobs: torch.Tensor) -> torch.Tensor:
        """DPOTrainer's loss of the six pairs of neighbours: chosen ones first, and a prompt of one token."""
        halves = lambda rows: torch.cat([rows[0::2], rows[1::2]])
        chosen, rejected = halves((ref * mask).sum(1)).chunk(2)
        local = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
        outputs = MagicMock(log_probs=halves(logprobs * mask), entropy=torch.zeros(12, 9))
        self = SimpleNamespace(
            model=MagicMock(training=True), accelerator=local, aux_loss_enabled=False, ld_alpha=None, beta=0.1,
            precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
            use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        )  # fmt: skip
        outputs.mean_logits, outputs.is_top1 = torch.zeros(12, 9), torch.zeros(12, 9, dtype=torch.bool)
        completion = torch.cat([torch.zeros(12, 1), halves(mask)], 1).long()
        inputs = {"input_ids": completion, "completion_mask": completion, "attention_mask": completion}
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return DPOTrainer._compute_loss(self, lambda **given: outputs, inputs, False)

    rloo_self = SimpleNamespace(beta=BETA, normalize_advantages=False)
    names = {"rewards": scores, "old_per_token_logps": old, "ref_per_token_logps": ref, "completion_mask": mask}
    names |= {"gather": lambda x: x, "num_generations": G}
    compute = GRPOTrainer._compute_loss
    return {
        "grpo advantages|scale_rewards group": advantages("group"),
        "grpo advantages, eps 1e-4|scale_rewards group": advantages("group"),
        "dr_grpo advantages|scale_rewards none": advantages("none"),
        "variant lite-ppo advantages|scale_rewards batch": advantages("batch"),
        "rloo advantages with KL|RLOOTrainer": run(leave_one_out, rloo_make, self=rloo_self, **names),
        "grpo loss|grpo": loss(compute, loss_type="grpo"),
        "grpo loss with KL|grpo, beta": loss(compute, loss_type="grpo", beta=BETA),
        "gspo loss|grpo, importance_sampling_level=sequence": loss(
            compute, loss_type="grpo", importance_sampling_level="sequence"
        ),
        "cispo loss, weights up to 1.28|cispo, epsilon_high 1.28": loss(
            compute, loss_type="cispo", epsilon_high=1 + HIGH
        ),
        "dr_grpo loss|dr_grpo": loss(compute, loss_type="dr_grpo"),
        "dapo loss, no dual clip|dapo": loss(compute, loss_type="dapo"),
        "rloo loss|RLOOTrainer": loss(RLOOTrainer._compute_loss),
        "dpo loss|DPOTrainer, sigmoid": with_gradient("logprobs", preferences),
        "opd loss over the vocabulary|generalized_jsd_loss, beta 1": with_gradient(
            "logits",
            lambda logits: distill(
                logits, b["teacher_logits"], torch.where(b["mask"], 0, -100), 1, 0.9, reduction="batchmean"
            ),
        ),
    }


def record() -> None:
    """Fetch the peers, run them, and write what they return."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PEERS], check=True
        )
        sys.path.insert(0, folder)
        theirs = {
            peer: {name: tensor.flatten().tolist() for name, tensor in lines.items()}
            for peer, lines in (("verl", verl_lines()), ("TRL", trl_lines()))
        }
    RECORDED.write_text(json.dumps({"peers": PEERS, **theirs}) + "\n")


def differences() -> list[tuple[str, str, str, float, str]]:
    """(line, peer, what the peer calls it, largest |ours - theirs|, why) for each line."""
    recorded, mine = json.loads(RECORDED.read_text()), ours() | our_variants()
    rows = []
    for peer in ("verl", "TRL"):
        for name, theirs in recorded[peer].items():
            line, called = name.split("|")
            difference = (mine[line].flatten().double() - torch.tensor(theirs, dtype=torch.float64)).abs().max().item()
            rows.append((line, peer, called, difference, DIFFERENT.get(name, "")))
    return rows


def table() -> str:
    lines = ["| ours | peer | theirs | largest difference | |", "|---|---|---|---|---|"]
    for line, peer, called, difference, why in differences():
        figure = f"{difference:.1e}" if why else "< 1e-6" if difference < 1e-6 else f"**{difference:.1e}**"
        lines.append(f"| {line} | {peer} | {called} | {figure} | {why or 'equal'} |")
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.record:
        record()
    page = ROOT / "docs/parity.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
    print(table())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
