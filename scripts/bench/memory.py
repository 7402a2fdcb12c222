"""Peak memory of log-probs and their gradients, with the whole (tokens, vocabulary) matrix and in chunks.

python scripts/bench/memory.py

A row has 4,096 tokens. Each case runs in a process of its own. The peak counts everything beyond hidden states and
head, gradients included. The last column is the largest relative difference between the gradients of the two.
"""

import tempfile
from pathlib import Path

import torch
import tyro
from measure import in_own_process, reset_peak, resident

from common.trainer.logits import ChunkedLogprobs, LogitShape

TOKENS, WIDTH, VOCABULARIES = 4096, 576, (50_000, 150_000)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def whole(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = (hidden @ head.t()).float().log_softmax(-1)  # (R, V)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, targets[:, None])[:, 0], entropy


def chunked(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ChunkedLogprobs.apply(hidden, head, targets, LogitShape(), True)


def peak_of(path: str, vocabulary: int, file: Path) -> float:
    """Peak of one case in MiB. Writes its gradients to the file."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device=DEVICE)
    head = torch.randn(vocabulary, WIDTH, device=DEVICE) / WIDTH**0.5
    targets = torch.randint(vocabulary, (TOKENS,), device=DEVICE)
    weights = torch.linspace(-1, 1, TOKENS, device=DEVICE)
    for tensor in (hidden, head):
        tensor.requires_grad_()
    before = resident("VmRSS")
    reset_peak()
    logprobs, _ = {"whole": whole, "chunked": chunked}[path](hidden, head, targets)
    gradients = torch.autograd.grad((logprobs * weights).sum(), (hidden, head))
    peak = resident("VmHWM") - before
    torch.save([x.cpu() for x in gradients], file)
    return peak


def main() -> None:
    print("| vocabulary | whole, MiB | chunked, MiB | times less | gradient differs by |", "|---" * 5 + "|", sep="\n")
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch) / path for path in ("whole", "chunked")]
            peaks = [in_own_process(peak_of, file.name, vocabulary, file) for file in files]
            worst = max(((a - b).norm() / a.norm()).item() for a, b in zip(*map(torch.load, files)))
        cells = f"{peaks[0]:.0f} | {peaks[1]:.0f} | {peaks[0] / peaks[1]:.1f} | {worst:.1e}"
        print(f"| {vocabulary} | {cells} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
