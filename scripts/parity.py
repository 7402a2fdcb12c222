"""Our advantages, losses and gradients next to those of verl 0.9.1 and TRL 1.16, on the same random batch.

    python scripts/parity.py             # writes the table into docs/parity.md, from what was recorded
    python scripts/parity.py --record    # fetches both wheels, runs their own code, and records what it returns

ours() and our_variants() map a line of the table to our result. verl_lines() and trl_lines() map "line|what the peer
calls it" to theirs; tests/parity.json holds those. Every line must be equal to 1e-6, except those in DIFFERENT.

The peers' packages come from wheels, without their dependencies. The script calls verl's trainer/ppo/core_algos.py, and
methods of TRL's GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer and CPOTrainer on stand-ins that hand them the batch.
The packages also import others that are never called here (ray, tensordict ...); stand-ins replace those. Neither peer
has PRIME.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import tyro

sys.path.append(str(Path(__file__).parent))
import blocks
import variants

from algos import cispo, dapo, dpo, dr_grpo, grpo, gspo, opd, ppo, reinforce_pp, remax, rloo, sdpo
from common.preflight.docstrings import help_text
from common.trainer.distillation import ChunkedKL
from common.trainer.logits import LogitShape

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests/parity.json"
PEERS = ("verl==0.9.1", "trl==1.16.0")
PAGE = ROOT / "docs/parity.md"
G = 4  # responses to each prompt
LOW = 0.2  # the ratio is clipped at 1 - LOW
HIGH = 0.28  # the ratio is clipped at 1 + HIGH
BETA = 0.04  # weight of the KL term
ENTROPY_COEF = 0.3  # weight of the entropy bonus
SIMPO_MARGIN = 0.7  # SimPO's gamma
KTO_WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
LONGEST = 16  # the length by which Dr. GRPO divides
Tensors = dict[str, torch.Tensor]

# "our line|what the peer calls it" -> why it differs. Every other line is equal to 1e-6.
DIFFERENT = {
    "grpo advantages, 16 x 0.7 in float32|grpo": "equal rewards: exactly 0 here, rounding over eps there",
    "grpo loss|vanilla, its defaults": "defaults there: token mean, dual clip at 3",
    "dr_grpo loss|vanilla, seq-mean-token-sum-norm": "no factor given: the padded width of the batch there",
    "grpo advantages|scale_rewards group": "eps 1e-6 here, 1e-4 there",
    "sdpo loss over the vocabulary|full_logits": "a mean over the taught tokens here; there one over responses, where "
    "those without a teacher count as 0",
    "rloo loss|RLOOTrainer": "token ratios and a token mean here, one ratio a sequence there",
}


@dataclasses.dataclass
class Args:
    record: bool = False  # Run the peers' code again.


@dataclasses.dataclass
class Batch:
    """12 responses to 3 prompts, of up to 9 tokens. Numbers are float64, and 0 outside the mask."""

    mask: torch.Tensor  # (12, 9) bool
    old: torch.Tensor  # (12, 9) log-probs before the update
    logprobs: torch.Tensor  # (12, 9) log-probs after it
    ref: torch.Tensor  # (12, 9) log-probs of the reference; the variants take them for the engine's
    scores: torch.Tensor  # (12,)
    greedy: torch.Tensor  # (12,) score of the greedy response to the same prompt
    values: torch.Tensor  # (12, 9)
    old_values: torch.Tensor  # (12, 9)
    logits: torch.Tensor  # (12, 9, 7) of a vocabulary of 7 tokens
    teacher_logits: torch.Tensor  # (12, 9, 7)


def batch() -> Batch:
    """The random batch, the same in every call. Its ratios reach past both clips, and past DAPO's third one at 3."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(3, 10, (12,), generator=generator)
    mask = torch.arange(9)[None] < lengths[:, None]
    old = -draw(12, 9).abs() - 0.1
    change = 0.4 * draw(12, 9)
    change[:, 1] = 1.5  # a ratio of 4.5 in each response
    return Batch(
        mask=mask,
        old=old * mask,
        logprobs=(old + change) * mask,
        ref=(old + 0.2 * draw(12, 9)) * mask,
        scores=draw(12).round(decimals=1),
        greedy=draw(3).round(decimals=1).repeat_interleave(G),
        values=draw(12, 9) * mask,
        old_values=draw(12, 9) * mask,
        logits=draw(12, 9, 7),
        teacher_logits=draw(12, 9, 7),
    )


def with_gradient(field: str, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """function(this field of the batch), and its gradient with respect to that field, as one vector."""
    leaf = getattr(batch(), field).clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return torch.cat([loss.detach()[None].double(), leaf.grad.flatten().double()])


def with_peer() -> torch.Tensor:
    """(12,) bool: responses with another right one in their group, where right is a score above 0."""
    return sdpo.right_peers(batch().scores > 0, G) >= 0


def ours() -> Tensors:
    """Each line of the table, by our functions."""
    b = batch()
    tokens = float(b.mask.sum())
    z = grpo.compute_advantages(b.scores, G)
    token_rewards = remax.reward_tokens(b.scores, b.old, b.ref, b.mask, BETA)
    token_rewards_without_kl = remax.reward_tokens(b.scores, b.old, None, b.mask, 0.0)
    advantages, returns = ppo.compute_advantages(token_rewards, b.values, b.mask, 1.0, 0.95)

    def whitened(rewards: torch.Tensor, baseline: str) -> torch.Tensor:
        """REINFORCE++'s advantages."""
        return reinforce_pp.whiten(reinforce_pp.compute_advantages(rewards, b.scores, b.mask, G, baseline), b.mask)

    def loss(algorithm, *arguments, clip_low: float = LOW, **keywords) -> torch.Tensor:
        """An algorithm's policy_loss. arguments: those between the old log-probs and the mask."""

        def function(logprobs: torch.Tensor) -> torch.Tensor:
            return algorithm.policy_loss(
                logprobs,
                b.old,
                *arguments,
                b.mask,
                clip_low=clip_low,
                clip_high=HIGH,
                **keywords,
            )

        return with_gradient("logprobs", function)

    def value_loss(values: torch.Tensor) -> torch.Tensor:
        return ppo.value_loss(values, b.old_values, returns, b.mask, clip=0.2, denominator=tokens)

    def preference_loss(logprobs: torch.Tensor) -> torch.Tensor:
        """DPO's loss of the six pairs of neighbours."""
        ref_sums = (b.ref * b.mask).sum(1).view(-1, 2)
        return dpo.dpo_loss(dpo.implicit_rewards(logprobs, ref_sums, b.mask, 0.1), 0.0).mean()

    def divergence(logits: torch.Tensor, mask: torch.Tensor = b.mask) -> torch.Tensor:
        """OPD's loss at temperature 0.9, and SDPO's where only some rows have a teacher. The heads are identities, so
        hidden states are logits.
        """
        student = logits[mask].float()
        teacher = b.teacher_logits[mask].float()
        head = torch.eye(7)
        shape = LogitShape(0.9)
        divergences, *_ = ChunkedKL.apply(student, head, shape, teacher, head, shape)
        every_token = torch.ones_like(divergences, dtype=torch.bool)
        return opd.vocabulary_loss(divergences, every_token, denominator=float(mask.sum()))

    def sampled(logits: torch.Tensor) -> torch.Tensor:
        """SDPO's loss where token 0 was sampled everywhere, at temperature 0.9 in the first update of a step."""
        taught = b.mask & with_peer()[:, None]
        logprobs = (logits / 0.9).log_softmax(-1)[..., 0]
        theirs = (b.teacher_logits / 0.9).log_softmax(-1)[..., 0]
        old = logprobs.detach()
        return sdpo.policy_loss(
            logprobs,
            old,
            sdpo.compute_advantages(old, theirs, taught),
            taught,
            clip_low=LOW,
            clip_high=HIGH,
            denominator=float(taught.sum()),
        )

    return {
        "grpo advantages": z,
        "grpo advantages, eps 1e-4": grpo.compute_advantages(b.scores, G, eps=1e-4),
        "grpo advantages, 16 x 0.7 in float32": grpo.compute_advantages(torch.full((16,), 0.7), 16),
        "dr_grpo advantages": dr_grpo.compute_advantages(b.scores, G),
        "rloo advantages": rloo.compute_advantages(b.scores, G),
        "rloo advantages with KL": rloo.compute_advantages(
            b.scores - BETA * rloo.sequence_kl(b.old, b.ref, b.mask),
            G,
        ),
        "remax token rewards": token_rewards,
        "remax advantages": remax.compute_advantages(token_rewards, b.greedy, b.mask),
        "reinforce_pp advantages with KL": whitened(token_rewards, "none"),
        "reinforce_pp advantages, group": whitened(token_rewards_without_kl, "group"),
        "ppo returns": returns,
        "ppo advantages, whitened": ppo.whiten(advantages, b.mask),
        "grpo loss": loss(grpo, None, z, kl_coef=0.0, denominator=12),
        "grpo loss with KL": loss(grpo, b.ref, z, kl_coef=BETA, denominator=12),
        "gspo loss": loss(gspo, None, z, kl_coef=0.0, denominator=12),
        "cispo loss": loss(cispo, None, z, kl_coef=0.0, denominator=tokens),
        "cispo loss, weights up to 1.28": loss(cispo, None, z, clip_low=1.0, kl_coef=0.0, denominator=tokens),
        "dr_grpo loss": loss(dr_grpo, None, z, kl_coef=0.0, denominator=12 * LONGEST),
        "dapo loss": loss(dapo, z, clip_dual=3.0, denominator=tokens),
        "dapo loss, no dual clip": loss(dapo, z, clip_dual=1e9, denominator=tokens),
        "rloo loss": loss(rloo, z, denominator=tokens),
        "dpo loss": with_gradient("logprobs", preference_loss),
        "opd loss over the vocabulary": with_gradient("logits", divergence),
        "sdpo peers": sdpo.right_peers(b.scores > 0, G).double(),
        "sdpo loss over the vocabulary": with_gradient(
            "logits", lambda logits: divergence(logits, b.mask & with_peer()[:, None])
        ),
        "sdpo gradient of sampled tokens": with_gradient("logits", sampled)[1:],
        "ppo loss": loss(ppo, z[:, None].expand(12, 9), denominator=tokens),
        "ppo value loss": with_gradient("values", value_loss),
    }


def our_variants() -> Tensors:
    """Lines of the table for docs/variants.md. The engine's log-probs are those of the reference."""
    b = batch()
    tokens = float(b.mask.sum())
    z = grpo.compute_advantages(b.scores, G)
    icepop = variants.load("icepop")
    sequence = variants.load("sequence-weights")
    sequence_mask = variants.load("sequence-mask")
    geometric = variants.load("geometric-mask")

    # Without randomness: every token of the band loses its gradient. At least one token is in it, and not all are.
    clip_cov = variants.load("clip-cov")
    keep = clip_cov.keep_tokens(clip_cov.covariance(b.logprobs, z, b.mask), b.mask, share=1.0)
    assert 0 < (keep == 0).sum() < tokens

    kl_cov = variants.load("kl-cov")
    penalized = kl_cov.penalized_tokens(kl_cov.covariance(b.logprobs, z, b.mask), b.mask, share=0.2)
    assert penalized.sum() == int(0.2 * tokens)

    def loss(algorithm, denominator: float = 12, **keywords) -> torch.Tensor:
        def function(logprobs: torch.Tensor) -> torch.Tensor:
            return algorithm.policy_loss(
                logprobs,
                b.old,
                None,
                z,
                b.mask,
                clip_low=LOW,
                clip_high=HIGH,
                kl_coef=0.0,
                denominator=denominator,
                **keywords,
            )

        return with_gradient("logprobs", function)

    def loss_with_entropy(logits: torch.Tensor) -> torch.Tensor:
        """GRPO's loss with the entropy bonus. The response has token 0 everywhere."""
        log_p = logits.log_softmax(-1)
        return variants.load("entropy-bonus").policy_loss(
            log_p[..., 0],
            b.old,
            None,
            z,
            b.mask,
            -(log_p.exp() * log_p).sum(-1),
            clip_low=LOW,
            clip_high=HIGH,
            kl_coef=0.0,
            entropy_coef=ENTROPY_COEF,
            denominator=12,
        )

    ref_sums = (b.ref * b.mask).sum(1).view(-1, 2)
    ipo, simpo, apo_zero, kto = (variants.load(name) for name in ("ipo", "simpo", "apo-zero", "kto"))

    def ipo_loss(logprobs: torch.Tensor) -> torch.Tensor:
        return ipo.ipo_loss(ipo.mean_log_ratios(logprobs, ref_sums, b.mask), 0.1).mean()

    def simpo_loss(logits: torch.Tensor) -> torch.Tensor:
        """The response has token 0 everywhere."""
        logprobs = logits.log_softmax(-1)[..., 0]
        return simpo.simpo_loss(simpo.implicit_rewards(logprobs, b.mask, 2.0), SIMPO_MARGIN, 0.1).mean()

    def apo_loss(logprobs: torch.Tensor) -> torch.Tensor:
        return apo_zero.apo_loss(apo_zero.implicit_rewards(logprobs, ref_sums, b.mask, 0.1)).mean()

    def kto_loss(logprobs: torch.Tensor) -> torch.Tensor:
        """The responses are those to other prompts as well, with the same log-probs, which have no gradient there."""
        z = kto.reference_point(kto.implicit_rewards(b.logprobs, ref_sums, b.mask, 0.1))
        rewards = kto.implicit_rewards(logprobs, ref_sums, b.mask, 0.1)
        return kto.kto_loss(rewards, z, **KTO_WEIGHTS).mean()

    all_graded = torch.ones(12, dtype=torch.bool)
    return {
        "variant ipo loss": with_gradient("logprobs", ipo_loss),
        "variant simpo loss": with_gradient("logits", simpo_loss),
        "variant apo-zero loss": with_gradient("logprobs", apo_loss),
        "variant kto loss": with_gradient("logprobs", kto_loss),
        "variant entropy-bonus loss": with_gradient("logits", loss_with_entropy),
        "variant no-std advantages": variants.load("no-std").compute_advantages(b.scores, G),
        "variant token-mean loss": loss(variants.load("token-mean"), denominator=tokens),
        "variant group-mean advantages": variants.load("group-mean").compute_advantages(b.scores, G),
        "variant lite-ppo advantages": variants.load("lite-ppo").compute_advantages(b.scores, all_graded, G, eps=1e-4),
        "variant opo advantages": variants.load("opo").compute_advantages(b.scores, b.mask.sum(1), G),
        "variant gmpo loss": loss(variants.load("gmpo")),
        "variant sapo loss": loss(variants.load("sapo")),
        "variant dppo loss": loss(variants.load("dppo"), denominator=tokens),
        "variant clip-cov gradient": loss(clip_cov, token_weights=keep)[1:],
        "variant kl-cov loss": loss(kl_cov, penalized=penalized),
        "variant icepop weights": icepop.rollout_weights(b.old, b.ref, b.mask, 1.2) * b.mask,
        "variant sequence weights": sequence.rollout_weights(b.old, b.ref, b.mask, 1.1) * b.mask,
        "variant sequence mask": sequence_mask.rollout_weights(b.old, b.ref, b.mask, 1.1) * b.mask,
        "variant geometric mask": geometric.rollout_weights(b.old, b.ref, b.mask, 1.05) * b.mask,
    }


def verl_lines() -> Tensors:
    """The verl lines by verl's own functions."""
    import numpy as np

    core = import_with_stand_ins("verl.trainer.ppo.core_algos")
    corrections = import_with_stand_ins("verl.trainer.ppo.rollout_corr_helper")
    functional = import_with_stand_ins("verl.utils.torch_functional")
    core.ActorConfig = Settings  # gspo's loss asks for the class of its config
    b = batch()
    mask = b.mask.double()
    index = np.arange(12) // G  # the prompt of each response
    z = grpo.compute_advantages(b.scores, G)[:, None] * mask

    def on_last_token(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Token rewards as verl makes them."""
        last = mask.sum(1, keepdim=True).long() - 1
        return torch.zeros_like(mask).scatter(1, last, scores[:, None])

    def one_a_response(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(N, T) -> (N,): the advantage, which is the same on all tokens of a response."""
        return (advantages * mask).sum(1) / mask.sum(1)

    def outcome(function, **keywords) -> torch.Tensor:
        """Advantages of one of verl's estimators for outcome rewards."""
        advantages, _ = function(on_last_token(b.scores, mask), mask, index, **keywords)
        return one_a_response(advantages, mask)

    def loss(
        mode: str,
        dual_clip: float,
        scale: float | None = None,
        kl: bool = False,
        policy_loss=core.compute_policy_loss_vanilla,
    ) -> torch.Tensor:
        config = Settings(
            clip_ratio=LOW,
            clip_ratio_low=LOW,
            clip_ratio_high=HIGH,
            clip_ratio_c=dual_clip,
            global_batch_info={"loss_scale_factor": scale} if scale else {},
            tau_pos=1.0,
            tau_neg=1.05,
            policy_loss=Settings(
                clip_cov_ratio=1.0,
                clip_cov_lb=1.0,
                clip_cov_ub=5.0,
                kl_cov_ratio=0.2,
                ppo_kl_coef=1.0,
            ),
        )

        def function(logprobs: torch.Tensor) -> torch.Tensor:
            value, *_ = policy_loss(b.old, logprobs, z, mask, mode, config)
            if kl:
                value = value + BETA * core.agg_loss(core.kl_penalty(logprobs, b.ref, "low_var_kl"), mask, mode)
            return value

        return with_gradient("logprobs", function)

    def loss_with_entropy(logits: torch.Tensor) -> torch.Tensor:
        """The entropy bonus as in ppo_loss of verl/workers/utils/losses.py, which asks for a config of a whole run."""
        mode = "seq-mean-token-mean"
        config = Settings(
            clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1e9, global_batch_info={}
        )
        logprobs = logits.log_softmax(-1)[..., 0]
        value, *_ = core.compute_policy_loss_vanilla(b.old, logprobs, z, mask, mode, config)
        return value - ENTROPY_COEF * core.agg_loss(functional.entropy_from_logits(logits), mask, mode)

    def value_loss(values: torch.Tensor) -> torch.Tensor:
        return core.compute_value_loss(values, returns, b.old_values, mask, 0.2)[0]

    def weights(level: str, threshold) -> torch.Tensor:
        """Importance weights of the engine's log-probs."""
        return corrections.compute_rollout_correction_weights(b.old - b.ref, mask, level, threshold)[0]

    token_rewards = core.compute_rewards(on_last_token(b.scores, mask), b.old, b.ref, BETA)
    white, returns = core.compute_gae_advantage_return(token_rewards, b.values, mask, 1.0, 0.95)
    two_tokens = torch.ones(16, 2)
    sevens = on_last_token(torch.full((16,), 0.7), two_tokens)
    of_sevens, _ = core.compute_grpo_outcome_advantage(sevens, two_tokens, np.zeros(16))
    return {
        "grpo advantages|grpo": outcome(core.compute_grpo_outcome_advantage),
        "grpo advantages, 16 x 0.7 in float32|grpo": one_a_response(of_sevens, two_tokens),
        "dr_grpo advantages|grpo, norm_adv_by_std_in_grpo=False": outcome(
            core.compute_grpo_outcome_advantage,
            norm_adv_by_std_in_grpo=False,
        ),
        "rloo advantages|rloo": outcome(core.compute_rloo_outcome_advantage),
        "remax token rewards|compute_rewards": token_rewards * mask,
        "remax advantages|remax": core.compute_remax_outcome_advantage(token_rewards, b.greedy, mask)[0],
        "reinforce_pp advantages with KL|reinforce_plus_plus": core.compute_reinforce_plus_plus_outcome_advantage(
            token_rewards,
            mask,
            Settings(gamma=1.0),
        )[0],
        "reinforce_pp advantages, group|reinforce_plus_plus_baseline": (
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(on_last_token(b.scores, mask), mask, index)[0]
        ),
        "variant opo advantages|opo": outcome(core.compute_opo_outcome_advantage),
        "variant entropy-bonus loss|vanilla, entropy_coeff": with_gradient("logits", loss_with_entropy),
        "variant no-std advantages|grpo, norm_adv_by_std_in_grpo=False": outcome(
            core.compute_grpo_outcome_advantage,
            norm_adv_by_std_in_grpo=False,
        ),
        "variant group-mean advantages|grpo, norm_adv_by_std_in_grpo=False": outcome(
            core.compute_grpo_outcome_advantage,
            norm_adv_by_std_in_grpo=False,
        ),
        "variant token-mean loss|vanilla, token-mean, c = 1e9": loss("token-mean", 1e9),
        "variant gmpo loss|geo_mean": loss("token-mean", 3.0, policy_loss=core.compute_policy_loss_geo_mean),
        "variant sapo loss|sapo": loss("seq-mean-token-mean", 3.0, policy_loss=core.compute_policy_loss_sapo),
        "variant dppo loss|dppo_tv": loss("token-mean", 20.0, policy_loss=core.compute_policy_loss_dppo_tv),
        "variant clip-cov gradient|clip_cov, all of the band": loss(
            "seq-mean-token-mean",
            3.0,
            policy_loss=core.compute_policy_loss_clip_cov,
        )[1:],
        "variant kl-cov loss|kl_cov": loss("seq-mean-token-mean", 3.0, policy_loss=core.compute_policy_loss_kl_cov),
        "variant icepop weights|rollout_is token, 0.5_1.2": weights("token", "0.5_1.2"),
        "variant sequence weights|rollout_is sequence": weights("sequence", 1.1) * mask,
        "variant sequence mask|rollout_is sequence, 1e-9_1.1": weights("sequence", "1e-9_1.1") * mask,
        "variant geometric mask|rollout_rs seq_mean_k1": corrections.compute_rollout_rejection_mask(
            b.old - b.ref,
            mask,
            "seq_mean_k1",
            f"{1 / 1.05}_1.05",
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
        "ppo value loss|compute_value_loss": with_gradient("values", value_loss),
    }


class Settings(dict):
    """A config that answers both config.key and config.get(key)."""

    __getattr__ = dict.__getitem__


def import_with_stand_ins(name: str):
    """Import a module. Packages that it imports and that are not installed are replaced: they are never called."""
    package = name.partition(".")[0]
    absent: list[str] = []
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name in absent or error.name == name:
                raise
            absent.append(error.name)
            sys.modules[error.name] = MagicMock(
                __path__=[],
                __spec__=importlib.machinery.ModuleSpec(error.name, None),
            )
            # The next try starts from nothing, because some of the package's modules are half imported.
            for module in list(sys.modules):
                if module.partition(".")[0] == package:
                    del sys.modules[module]


def statements(method, first: str, last: str) -> list[ast.stmt]:
    """The statements of a method from the one that starts with `first` to the one that starts with `last`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body
    texts = [ast.unparse(statement) for statement in body]
    begin = next(i for i, text in enumerate(texts) if text.startswith(first))
    end = max(i for i, text in enumerate(texts) if text.startswith(last))
    return body[begin : end + 1]


def run(code: list[ast.stmt], method, **names) -> torch.Tensor:
    """Execute statements of a method with these names; returns `advantages`."""
    names = {**method.__globals__, **names}
    exec(compile(ast.Module(code, []), method.__qualname__, "exec"), names)
    return names["advantages"]


def identity(tensor: torch.Tensor, *_, **__) -> torch.Tensor:
    """What gather() and reduce() return on one rank."""
    return tensor


def trl_lines() -> Tensors:
    """The TRL lines by the trainers' own methods."""
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer

    cpo = import_with_stand_ins("trl.experimental.cpo.cpo_trainer")
    gold = import_with_stand_ins("trl.experimental.gold.gold_trainer")
    sdpo_module = import_with_stand_ins("trl.experimental.sdpo.sdpo_trainer")
    b = batch()
    mask = b.mask.double()
    taught = b.mask & with_peer()[:, None]
    z = grpo.compute_advantages(b.scores, G)

    def advantages(scale: str) -> torch.Tensor:
        """GRPOTrainer's. They are computed in the middle of a long method, so only these statements are run."""
        method = GRPOTrainer._generate_and_score_completions
        code = statements(method, "if self.multi_objective_aggregation", "if self.multi_objective_aggregation")
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards=scale,
        )
        return run(
            code,
            method,
            self=trainer,
            num_generations=G,
            device="cpu",
            rewards_per_func=b.scores[:, None],
            unscorable_mask=torch.zeros(12, dtype=torch.bool),
        )

    def leave_one_out() -> torch.Tensor:
        """RLOOTrainer's advantages, with the KL in the rewards."""
        method = RLOOTrainer._generate_and_score_completions
        code = statements(method, "if self.beta != 0.0:\n    per_token_kl", "advantages = torch.nan_to_num")
        return run(
            code,
            method,
            self=SimpleNamespace(beta=BETA, normalize_advantages=False),
            rewards=b.scores,
            old_per_token_logps=b.old,
            ref_per_token_logps=b.ref,
            completion_mask=mask,
            gather=identity,
            num_generations=G,
        )

    def loss(method, **settings) -> torch.Tensor:
        """A trainer's _compute_loss of the batch. settings: attributes of the trainer."""

        def function(logprobs: torch.Tensor) -> torch.Tensor:
            trainer = grpo_trainer(logprobs, settings)
            prompt = torch.zeros(12, 1, dtype=torch.long)
            inputs = {
                "prompt_ids": prompt,
                "prompt_mask": prompt,
                "completion_ids": mask.long(),
                "completion_mask": mask,
                "advantages": z,
                "old_per_token_logps": b.old,
                "old_logps": (b.old * mask).sum(1),
                "ref_per_token_logps": b.ref,
                "num_items_in_batch": mask.sum(),
            }
            return method(trainer, None, inputs)

        return with_gradient("logprobs", function)

    def chosen_first(rows: torch.Tensor) -> torch.Tensor:
        """In the order that DPOTrainer wants: all chosen responses, then all rejected ones."""
        return torch.cat([rows[0::2], rows[1::2]])

    def preference_loss(logprobs: torch.Tensor, loss_type: str = "sigmoid") -> torch.Tensor:
        """DPOTrainer's loss of the six pairs of neighbours, with a prompt of one token."""
        chosen, rejected = chosen_first((b.ref * mask).sum(1)).chunk(2)
        completion = torch.cat([torch.zeros(12, 1), chosen_first(mask)], 1).long()
        inputs = {
            "input_ids": completion,
            "completion_mask": completion,
            "attention_mask": completion,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        outputs = MagicMock(
            log_probs=chosen_first(logprobs * mask),
            entropy=torch.zeros(12, 9),
            mean_logits=torch.zeros(12, 9),
            is_top1=torch.zeros(12, 9, dtype=torch.bool),
        )

        def forward(**_) -> MagicMock:
            return outputs

        return DPOTrainer._compute_loss(dpo_trainer(loss_type), forward, inputs, False)

    def kto_loss(logprobs: torch.Tensor) -> torch.Tensor:
        """KTOTrainer's loss of the responses, every second of which is rejected. They answer other prompts, too."""
        completion = torch.cat([torch.zeros(12, 1), mask], 1).long()
        inputs = {
            "input_ids": completion,
            "completion_mask": completion,
            "attention_mask": completion,
            "label": torch.tensor([1, 0] * 6),
            "ref_logps": (b.ref * mask).sum(1),
            "ref_KL_logps": (b.ref * mask).sum(1),
        }
        outputs = MagicMock(log_probs=logprobs * mask, entropy=torch.zeros(12, 9), mean_logits=torch.zeros(12, 9))
        trainer = dpo_trainer("kto")
        vars(trainer).update(
            calculate_KL=True,
            loss_type="kto",
            _compute_kl_logps=lambda *_: (b.logprobs * mask).sum(1),
            **KTO_WEIGHTS,
        )
        return KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)

    def without_reference(logits: torch.Tensor) -> torch.Tensor:
        """CPOTrainer's loss of the same pairs. The response has token 0 everywhere."""
        trainer = SimpleNamespace(
            alpha=0.0,
            beta=2.0,
            loss_type="simpo",
            simpo_gamma=SIMPO_MARGIN,
            label_smoothing=0.1,
            accelerator=SimpleNamespace(device="cpu"),
        )
        whole = torch.cat([logits, torch.zeros(12, 1, 7)], 1)  # the last token predicts nothing
        labels = torch.where(b.mask, 0, -100)
        labels = torch.cat([torch.full((12, 1), -100), labels], 1)  # a prompt of one token
        means = cpo.CPOTrainer.get_batch_logps(whole, labels, average_log_prob=True)
        losses, *_ = cpo.CPOTrainer.cpo_loss(trainer, *chosen_first(means).chunk(2))
        return losses.mean()

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        labels = torch.where(b.mask, 0, -100)  # -100: not a response token
        return gold.GOLDTrainer.generalized_jsd_loss(
            logits,
            b.teacher_logits,
            labels,
            1,
            0.9,
            reduction="batchmean",
        )

    def self_distillation(mode: str, mask: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """SDPOTrainer's loss of these tokens, at temperature 0.9; alpha 1 is the reverse KL."""

        def function(logits: torch.Tensor) -> torch.Tensor:
            trainer = sdpo_trainer(mode)
            given = sdpo_module.DistillationLogits(
                completion_ids=torch.zeros_like(mask, dtype=torch.long),
                completion_mask=mask,
                loss_mask=mask.double(),
                student_logits=logits / 0.9,
                teacher_logits=b.teacher_logits.view(logits.shape) / 0.9,
            )
            method = sdpo_module.SDPOTrainer._compute_self_distillation_loss
            return method(trainer, SimpleNamespace(training=True), {}, given)

        return function

    def as_one_response(mode: str) -> torch.Tensor:
        """The loss and gradient of all tokens in one response, whose mean is the mean over all tokens."""
        loss_of = self_distillation(mode, taught.view(1, -1))
        return with_gradient("logits", lambda logits: loss_of(logits.view(1, -1, 7)))

    grpo_loss = GRPOTrainer._compute_loss
    return {
        "grpo advantages|scale_rewards group": advantages("group"),
        "grpo advantages, eps 1e-4|scale_rewards group": advantages("group"),
        "dr_grpo advantages|scale_rewards none": advantages("none"),
        "variant lite-ppo advantages|scale_rewards batch": advantages("batch"),
        "rloo advantages with KL|RLOOTrainer": leave_one_out(),
        "grpo loss|grpo": loss(grpo_loss, loss_type="grpo"),
        "grpo loss with KL|grpo, beta": loss(grpo_loss, loss_type="grpo", beta=BETA),
        "gspo loss|grpo, importance_sampling_level=sequence": loss(
            grpo_loss,
            loss_type="grpo",
            importance_sampling_level="sequence",
        ),
        "cispo loss, weights up to 1.28|cispo, epsilon_high 1.28": loss(
            grpo_loss,
            loss_type="cispo",
            epsilon_high=1 + HIGH,
        ),
        "dr_grpo loss|dr_grpo": loss(grpo_loss, loss_type="dr_grpo"),
        "dapo loss, no dual clip|dapo": loss(grpo_loss, loss_type="dapo"),
        "rloo loss|RLOOTrainer": loss(RLOOTrainer._compute_loss),
        "dpo loss|DPOTrainer, sigmoid": with_gradient("logprobs", preference_loss),
        "variant ipo loss|DPOTrainer, ipo": with_gradient("logprobs", partial(preference_loss, loss_type="ipo")),
        "variant apo-zero loss|DPOTrainer, apo_zero": with_gradient(
            "logprobs",
            partial(preference_loss, loss_type="apo_zero"),
        ),
        "variant kto loss|KTOTrainer, kto": with_gradient("logprobs", kto_loss),
        "variant simpo loss|CPOTrainer, simpo": with_gradient("logits", without_reference),
        "opd loss over the vocabulary|generalized_jsd_loss, beta 1": with_gradient("logits", divergence),
        "sdpo peers|use_successful_as_teacher": peers_of(sdpo_module, b.scores > 0),
        "sdpo loss over the vocabulary|full_logits, all tokens in one response": as_one_response("full_logits"),
        "sdpo loss over the vocabulary|full_logits": with_gradient("logits", self_distillation("full_logits", taught)),
        "sdpo gradient of sampled tokens|sampled_token": as_one_response("sampled_token")[1:],
    }


def recorded_metrics() -> defaultdict:
    """What a trainer's _metrics is: mode -> name -> values."""
    return defaultdict(lambda: defaultdict(list))


def grpo_trainer(logprobs: torch.Tensor, settings: dict) -> SimpleNamespace:
    """A stand-in for GRPOTrainer or RLOOTrainer. It hands out these log-probs. settings: other attributes."""

    def logprobs_and_entropies(*_, **__) -> tuple:
        return logprobs, torch.zeros(12, 9), None

    attributes = {
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "max_completion_length": LONGEST,
        "accelerator": SimpleNamespace(num_processes=1, gather=identity, reduce=identity),
        "_metrics": recorded_metrics(),
        "_get_per_token_logps_and_entropies": logprobs_and_entropies,
    }
    return SimpleNamespace(**attributes | settings)


def sdpo_trainer(mode: str) -> SimpleNamespace:
    """A stand-in for SDPOTrainer with the reverse KL."""
    return SimpleNamespace(
        args=SimpleNamespace(distillation_mode=mode, distillation_alpha=1.0, distillation_is_clip=None),
        accelerator=SimpleNamespace(gather=identity),
        _log_self_distillation_metric=lambda *_: None,
    )


def peers_of(sdpo_module, right: torch.Tensor) -> torch.Tensor:
    """The response that SDPOTrainer shows each response's teacher, -1 for none. A response's only token is its number,
    and the teacher's prompt is nothing but the hint.
    """
    prompts: list[str] = []

    def tokenize(texts: list[str]) -> list[list[int]]:
        prompts.extend(texts)
        return [[0]] * len(texts)

    sdpo_module.gather_object = identity
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            success_reward_threshold=1.0,
            dont_reprompt_on_self_success=True,
            environment_feedback_only_without_solution=False,
            use_successful_as_teacher=True,
            include_environment_feedback=False,
            remove_thinking_from_demonstration=False,
            solution_template="{successful_previous_attempt}",
            reprompt_template="{solution}",
            max_reprompt_len=10,
        ),
        accelerator=SimpleNamespace(device="cpu", process_index=0, gather=identity, pad_across_processes=identity),
        model=SimpleNamespace(training=True),
        num_generations=G,
        processing_class=SimpleNamespace(decode=lambda ids, **_: str(int(ids[0]))),
        _tokenizer=SimpleNamespace(pad_token_id=-1),
        _tokenize_prompts_untruncated=tokenize,
    )
    numbers = torch.arange(len(right))[:, None]
    output = {"completion_ids": numbers, "completion_mask": torch.ones_like(numbers)}
    builder = sdpo_module.SuccessfulRolloutTeacherContextBuilder(trainer)
    builder.build(output, ["-1"] * len(right), right.double())
    return torch.tensor([float(text) for text in prompts], dtype=torch.float64)


def dpo_trainer(loss_type: str) -> SimpleNamespace:
    """A stand-in for DPOTrainer or KTOTrainer, with beta 0.1 and the reference's log-probs in its inputs."""
    return SimpleNamespace(
        model=MagicMock(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=identity, gather_for_metrics=identity),
        aux_loss_enabled=False,
        ld_alpha=None,
        beta=0.1,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        _metrics=recorded_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )


def record() -> None:
    """Fetch the peers, run them, and write what they return."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PEERS]
        subprocess.run(install, check=True)
        sys.path.insert(0, folder)
        theirs = {"verl": as_lists(verl_lines()), "TRL": as_lists(trl_lines())}
    RECORDED.write_text(json.dumps({"peers": PEERS, **theirs}) + "\n")


def as_lists(lines: Tensors) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in lines.items()}


@dataclasses.dataclass
class Row:
    """A line of the table."""

    line: str
    peer: str
    called: str  # what the peer calls it
    difference: float  # the largest |ours - theirs|
    why: str  # why they differ; "" if they must be equal


def differences() -> list[Row]:
    """All lines of the table, from what was recorded."""
    recorded = json.loads(RECORDED.read_text())
    mine = ours() | our_variants()
    rows = []
    for peer in ("verl", "TRL"):
        for name, theirs in recorded[peer].items():
            line, called = name.split("|")
            difference = mine[line].flatten().double() - torch.tensor(theirs, dtype=torch.float64)
            rows.append(Row(line, peer, called, difference.abs().max().item(), DIFFERENT.get(name, "")))
    return rows


def table() -> str:
    """The table of docs/parity.md. A difference that should not be there is bold."""
    lines = ["| ours | peer | theirs | largest difference | |", "|---|---|---|---|---|"]
    for row in differences():
        figure = f"{row.difference:.1e}"
        if not row.why:
            figure = "< 1e-6" if row.difference < 1e-6 else f"**{figure}**"
        lines.append(f"| {row.line} | {row.peer} | {row.called} | {figure} | {row.why or 'equal'} |")
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.record:
        record()
    text = table()
    blocks.write(PAGE, "parity", text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=help_text(__doc__)))
