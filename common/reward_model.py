"""A reward model: a sequence classifier with one output.

It reads whole conversations with its own tokenizer and chat template, whatever the policy's are. Each rank scores its
own responses, without gradient: `model:FOLDER` on a full copy, `model-sharded:FOLDER` on a model sharded over all
ranks by FSDP2, `model-cpu:FOLDER` in a process of its own on the CPU (common/workers.py), so that a GPU stays free.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from common.errors import BadInput, RunFailed
from common.grading import Item, Result, grade_gsm8k, parse_gold
from common.safe_pickle import check_weights, has_safetensors
from common.workers import Failure, WorkerPool

TOKENS_PER_BATCH = 16384  # padded tokens per forward
MEMORY_GIB = 1024.0  # for a worker: as much as there is


def conversation(
    tokenizer: PreTrainedTokenizerBase, content: str | list[dict], response: str, ended: bool
) -> list[int]:
    """Token ids of a prompt and its response: by the chat template if there is one, else end to end and an end token.

    ended: the response was not cut off; a template ends it either way. Training and scoring both come here.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        messages.append({"role": "assistant", "content": response})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the BOS
    text = content if isinstance(content, str) else "\n".join(message["content"] for message in content) + "\n"
    return tokenizer(text + response)["input_ids"] + ([tokenizer.eos_token_id] if ended else [])


class RewardModel:
    """One of the rewards of common/rewards.py. Its weights are loaded at the first call."""

    def __init__(self, path: str, sharded: bool = False, trust_pickle: bool = False):
        """Raises BadInput, without reading weights. sharded: every call is a collective, and every rank makes it."""
        check_weights(path, trust_pickle, f"--reward model:{path}")
        try:
            self.config = AutoConfig.from_pretrained(path)
            self.tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise BadInput(f"--reward model:{path}: cannot be loaded: {reason}") from None
        if self.config.num_labels != 1:
            raise BadInput(f"--reward model:{path}: has {self.config.num_labels} outputs, a reward model has one")
        self.padding = self.tokenizer.pad_token_id or 0  # any token: the mask says where a conversation ends
        self.path, self.sharded, self.model = path, sharded, None

    def load(self) -> None:
        """Read the weights. Raises BadInput without a trained head: a random one would train happily."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.model, info = AutoModelForSequenceClassification.from_pretrained(
            self.path, config=self.config, dtype=torch.bfloat16 if cuda else torch.float32, output_loading_info=True,
            use_safetensors=has_safetensors(self.path),
        )  # fmt: skip
        if info["missing_keys"]:
            raise BadInput(f"--reward model:{self.path}: not a reward model, has no {sorted(info['missing_keys'])[0]}")
        self.model.eval().requires_grad_(False)
        if self.sharded:  # from the host's copy, so that no GPU ever holds the whole
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in self.model.base_model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model.base_model, mesh=mesh)
        self.model.to(device)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """score: the model's output. acc: grade_gsm8k where the reference answer is a number, else score > 0."""
        if self.model is None:
            self.load()
        contents = [item.meta.get("prompt", item.meta.get("question", item.prompt)) for item in items]
        ids = [
            conversation(self.tokenizer, content, item.response, not cut)
            for content, item, cut in zip(contents, items, truncated)
        ]
        longest = getattr(self.config, "max_position_embeddings", None)
        too_long = self.largest(max(map(len, ids)))
        if longest and too_long > longest:
            raise BadInput(
                f"--reward model:{self.path}: a conversation of {too_long} tokens, it has {longest} positions"
            )
        results = []
        for item, score in zip(items, self.scores(ids)):
            known = parse_gold(item.answer) is not None
            results.append(Result(score, grade_gsm8k(item.response, item.answer) if known else float(score > 0)))
        return results

    @torch.no_grad()
    def scores(self, ids: list[list[int]]) -> list[float]:
        """One number a conversation, in order; batches of similar lengths, padded on the right."""
        out = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        while self.largest(len(order)):
            size = min(len(order), max(1, TOKENS_PER_BATCH // len(ids[order[-1]]))) if order else 0
            rows, order = order[len(order) - size :], order[: len(order) - size]
            given = [ids[i] for i in rows] or [[self.padding]]  # a dummy keeps this rank in step with the others
            width = max(map(len, given))
            inputs = torch.full((len(given), width), self.padding, device=self.model.device)
            mask = torch.zeros_like(inputs)
            for k, row in enumerate(given):
                inputs[k, : len(row)] = torch.tensor(row, device=inputs.device)
                mask[k, : len(row)] = 1
            # Not the model's own pooling: it looks for padding by token id, which may be the end token's.
            hidden = self.model.base_model(input_ids=inputs, attention_mask=mask, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(given), device=inputs.device), mask.sum(1) - 1].float()
            for i, score in zip(rows, (last @ self.model.score.weight[0].float()).tolist()):  # bfloat16 would tie
                out[i] = score
        return out

    def largest(self, number: int) -> int:
        """The largest over the ranks of a sharded model, which must make the same forwards; else the number itself."""
        if self.sharded:
            tensor = torch.tensor(number)  # on CPU: gloo
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return int(tensor)
        return number


class RewardModelOnCPU:
    """RewardModel in a worker process, which holds no GPU. Its weights are loaded at the first call."""

    waits = True  # for another process: common/reward_mixture.py calls it in a thread

    def __init__(self, path: str, trust_pickle: bool = False):
        """Raises BadInput, without reading weights."""
        RewardModel(path, trust_pickle=trust_pickle)
        self.spec = f"model-cpu:{path}"
        self.pool = WorkerPool(self.spec, workers=1, deadline=60.0, memory_gib=MEMORY_GIB)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed: a model that fails on one batch fails on the next."""
        (outcome,) = self.pool.run([(items, lengths, truncated)])
        if isinstance(outcome, Failure):
            raise RunFailed(f'reward "{self.spec}" {outcome.kind}: {outcome.message}', code="reward-failed")
        return outcome
