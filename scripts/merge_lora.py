"""Add LoRA adapters to the model that they were trained on, and write the whole model.

python scripts/merge_lora.py runs/grpo/checkpoints/step_000200/model merged
python scripts/merge_lora.py ADAPTERS OUTPUT --base Qwen/Qwen2.5-7B-Instruct --dtype bfloat16

The adapters are added in float32: W + (alpha / rank) B A. vLLM, transformers and --model load the result.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from common import errors
from common.data.tokenizer import causal_class, load_tokenizer, resolve_model
from common.errors import BadInput


@dataclasses.dataclass
class Args:
    adapters: Annotated[Path, tyro.conf.Positional]  # Folder of a checkpoint's model, as --lora-rank writes it.
    output: Annotated[Path, tyro.conf.Positional]  # New folder.
    base: str = ""  # Model that the adapters belong to. Default: what adapter_config.json names.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # Data type of the written weights.


@torch.no_grad()
def main(args: Args) -> None:
    if not (args.adapters / "adapter_config.json").is_file():
        raise BadInput(f"{args.adapters}: has no adapter_config.json; --lora-rank writes one")
    if args.output.exists():
        raise BadInput(f"{args.output}: exists already")
    config = json.loads((args.adapters / "adapter_config.json").read_text())
    base = resolve_model(args.base or config["base_model_name_or_path"])
    load_tokenizer(base, "--base")  # refuses what is not there
    model = causal_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype=torch.float32)
    tensors = load_file(args.adapters / "adapter_model.safetensors")
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        model.get_submodule(layer).weight.addmm_(up, down, alpha=config["lora_alpha"] / config["r"])
    for parameter in model.parameters():  # buffers keep their dtype
        parameter.data = parameter.data.to(getattr(torch, args.dtype))
    model.config.dtype = getattr(torch, args.dtype)
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.adapters).save_pretrained(args.output)
    for file in args.adapters.glob("*processor*.json"):  # of a model that sees images
        shutil.copy(file, args.output)
    print(f"{len(tensors) // 2} layers adapted: {args.output}")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args))
