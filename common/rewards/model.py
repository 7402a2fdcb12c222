"""A reward model: a sequence classifier with one output.

It reads whole conversations with its own tokenizer and chat template, whatever those of the policy are. Each rank
scores its own responses, without gradient: `model:FOLDER` with a full copy of the model, `model-sharded:FOLDER` with a
model sharded over all ranks by FSDP2, `model-cpu:FOLDER` in a worker process on the CPU, which leaves the GPU free.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common import placement
from common.data import dates, templates, weights
from common.data.rows import first_line
from common.data.tokenizer import refuse_pickles
from common.errors import BadInput, RunFailed
from common.processes.child import Handler
from common.rewards.grading import Item, Result, grade_gsm8k, parse_gold
from common.rewards.workers import Graders, batch_handler

MAX_BATCH_TOKENS = 16384  # padded tokens in one forward
LOAD_SECONDS = 600.0  # for a worker that reads the weights: a large model may come from a slow disk


def conversation(tokenizer, content: str | list[dict], response: str, ended: bool) -> list[int]:
    """Token ids of a prompt and its response, by the chat template. Both training and scoring call it.

    Without a template the two texts follow each other, then an end token if the response ended by itself (`ended`).
    A template ends every response.
    """
    if not isinstance(content, str) and content[-1]["role"] == "assistant":
        # The prompt ends with the beginning of the response: both are one message.
        response = content[-1]["content"] + response
        content = content[:-1]
    if tokenizer.chat_template:
        messages = [*templates.as_messages(content), {"role": "assistant", "content": response}]
        try:
            text = templates.chat_text(messages, tokenizer, ended=True)
        except templates.REFUSALS as error:  # many refuse a system prompt, or two messages of one role in a row
            roles = ", ".join(message["role"] for message in messages)
            raise BadInput(f"the reward model's chat template refuses messages of {roles}: {error}") from None
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written the BOS
    if not isinstance(content, str):
        content = "".join(message["content"] + "\n" for message in content)
    ids = tokenizer(content + response)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if ended else ids


def raw_prompt(meta: dict, rendered: str) -> str | list[dict]:
    """The prompt as the row has it. rendered: what the policy's chat template has made of it."""
    return meta.get("prompt", meta.get("question", rendered))


def make_batches(lengths: list[int]) -> list[list[int]]:
    """The rows of each forward. A batch holds similar lengths, and the longest conversations come first."""
    # Similar lengths need little padding. If the memory does not suffice, the first batch shows it.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = []
    while order:
        longest = lengths[order[-1]]
        size = max(1, MAX_BATCH_TOKENS // longest)
        batches.append(order[-size:])
        del order[-size:]
    return batches


class RewardModel:
    """One of the rewards of common/rewards/__init__.py. The first call reads the weights."""

    def __init__(self, path: str, sharded: bool = False, date: str = ""):
        """Reads configuration and tokenizer, no weights. Raises BadInput. sharded: every call is a collective.

        date: the date of the run, for the chat template.
        """
        self.path = path
        self.sharded = sharded
        self.model = None
        self.flag = f"--reward model:{path}"
        refuse_pickles(path, self.flag)
        try:
            self.config = AutoConfig.from_pretrained(path)
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            dates.set_date(self.tokenizer, date)
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.flag}: cannot be loaded: {first_line(error)}") from None
        if self.config.num_labels != 1:
            raise BadInput(f"{self.flag}: has {self.config.num_labels} outputs, a reward model has one")
        # On the meta device a model has names and shapes, and no weights. They give the head and the size.
        try:
            with torch.device("meta"):
                skeleton = AutoModelForSequenceClassification.from_config(self.config)
        except ValueError:
            skeleton = None
        # Encoders have other heads, which read another token.
        if not hasattr(skeleton, "score"):
            raise BadInput(
                f"{self.flag}: {self.config.model_type} has no head named score that reads the last token; "
                "reward models are decoders"
            )
        self.parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        self.faults: dict[tuple[str, ...], str] = {}  # roles of a prompt -> why the chat template refuses it, or ""
        # Here, because the first call comes after the first rollout. The weights of a name on the Hub are checked then.
        if Path(path).is_dir() and not weights.quantization(self.config):
            described = self.read(device_map="meta")
            weights.check_headers(path, described.all_tied_weights_keys, self.flag)

    def fault_of(self, prompt) -> str:
        """Why the chat template refuses a row, or "". In a run, one rank would leave the others waiting.

        Templates refuse roles, and their order. So one prompt of each order is tried.
        """
        content = raw_prompt(prompt.meta, prompt.text)
        roles = ("user",) if isinstance(content, str) else tuple(message["role"] for message in content)
        if roles not in self.faults:
            try:
                conversation(self.tokenizer, content, "1", ended=True)
                self.faults[roles] = ""
            except BadInput as error:
                self.faults[roles] = f"{self.flag}: {error}"
        return self.faults[roles]

    def read(self, **options) -> torch.nn.Module:
        """The model with the weights of its files, and no others. Raises BadInput.

        A head that is missing would start at random, and train the policy without any sign of it.
        """
        return weights.read(
            AutoModelForSequenceClassification,
            self.path,
            self.flag,
            config=self.config,
            **options,
        )

    def load(self) -> None:
        """Read the weights. Raises BadInput."""
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            dtype = torch.bfloat16
        else:
            device = torch.device("cpu")
            dtype = torch.float32
        self.model = self.read(dtype=dtype)
        self.model.eval().requires_grad_(False)
        if self.sharded:  # from the copy in host memory, so no GPU ever holds the whole model
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in self.model.base_model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model.base_model, mesh=mesh)
        self.model.to(device)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """score: output of the model. acc: grade_gsm8k if the reference answer is a number."""
        if self.model is None:
            self.load()
        ids = []
        for item, cut in zip(items, truncated):
            content = raw_prompt(item.meta, item.prompt)
            ids.append(conversation(self.tokenizer, content, item.response, not cut))
        # All ranks raise if one has too long a conversation. Otherwise the others would wait for it in forward().
        positions = getattr(self.config, "max_position_embeddings", None)
        longest = self.maximum(max(map(len, ids)))
        if positions and longest > positions:
            raise BadInput(f"{self.flag}: a conversation of {longest} tokens, it has {positions} positions")
        results = []
        for item, score in zip(items, self.scores(ids)):
            # Without a number to compare with there is no acc, and mixture.py takes score > 0.
            numeric = item.answer is not None and parse_gold(item.answer) is not None
            results.append(Result(score, grade_gsm8k(item.response, item.answer) if numeric else None))
        return results

    def scores(self, ids: list[list[int]]) -> list[float]:
        """One number for each conversation, in order."""
        scores = [0.0] * len(ids)
        batches = make_batches([len(row) for row in ids])
        for number in range(self.maximum(len(batches))):
            if number < len(batches):
                for row, score in zip(batches[number], self.forward([ids[row] for row in batches[number]])):
                    scores[row] = score
            else:
                # Every forward of a sharded model is a collective, so a rank that is done runs one token.
                self.forward([[0]])
        return scores

    @torch.no_grad()
    def forward(self, batch: list[list[int]]) -> list[float]:
        """One number for each of n conversations, which are padded on the right."""
        rows = [torch.tensor(ids) for ids in batch]
        lengths = torch.tensor([len(row) for row in rows])
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.model.device)  # (n, T)
        mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(inputs.device)  # (n, T)
        hidden = self.model.base_model(input_ids=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        # The model's own pooling finds padding by token id, which may be that of the end token. The lengths are exact.
        last = hidden[torch.arange(len(rows)), lengths - 1].float()  # (n, H); in bfloat16 scores would tie
        return (last @ self.model.score.weight[0].float()).tolist()

    def maximum(self, number: int) -> int:
        """The maximum over all ranks if the model is sharded, so that they run the same number of forwards."""
        if not self.sharded:
            return number
        tensor = torch.tensor(number)  # on the CPU, by gloo
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)


class RewardModelOnCPU:
    """RewardModel in a worker process without a GPU. The first call reads the weights."""

    waits = True  # mixture.py calls it in a thread, because it waits for another process

    def __init__(self, path: str, date: str = ""):
        """Reads configuration and tokenizer, no weights. Raises BadInput."""
        model = RewardModel(path, date=date)
        self.parameters = model.parameters
        self.fault_of = model.fault_of
        self.spec = f"model-cpu:{path}"
        self.pool = Graders(
            self.spec,
            loader="common.rewards.model:load_on_cpu",
            arguments=[path, date],
            item_seconds=60.0,
            workers=1,
            start_seconds=LOAD_SECONDS,
        )

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed: a model that fails on one batch fails on the next one, too."""
        outcome = self.pool.grade(items, lengths, truncated)
        if not isinstance(outcome, list):
            raise RunFailed(f'reward "{self.spec}" {outcome.kind}: {outcome.message}', code="reward-failed")
        return outcome


def load_on_cpu(path: str, date: str) -> Handler:
    """The handler of RewardModelOnCPU's worker, which may take all memory of the machine."""
    placement.use_cores()
    model = RewardModel(path, date=date)
    model.load()
    return batch_handler(model, memory_gib=None)
