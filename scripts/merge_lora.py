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
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.pytorch_utils import Conv1D

from common import errors
from common.data import weights
from common.data.rows import first_line
from common.data.tokenizer import causal_class, load_tokenizer, resolve_model
from common.errors import BadInput
from common.preflight import checks, folders
from common.preflight.docstrings import help_text
from common.run import checkpoint


@dataclasses.dataclass
class Args:
    adapters: Annotated[Path, tyro.conf.Positional]  # Folder of a checkpoint's model, as --lora-rank writes it.
    output: Annotated[Path, tyro.conf.Positional]  # New folder.
    base: str = ""  # Model that the adapters belong to. Default: what adapter_config.json names.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the written weights. auto: that of --base.


# Settings of peft's adapters that change what is added, and that this script does not know: key -> what it expects.
PLAIN = {
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
    "lora_bias": False,
}


def read_adapters(folder: Path) -> tuple[dict, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """adapter_config.json, and name of a layer -> its A (rank, in) and B (out, rank). Raises BadInput."""
    config = json.loads((folder / "adapter_config.json").read_text())
    for key, plain in PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise BadInput(f"{folder}/adapter_config.json: {key} is {config[key]!r}, which this script cannot merge")
    file = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read, perhaps a copy was cut short: {first_line(error)}") from None
    layers = {}
    for name in sorted(tensors):
        if name.endswith(".lora_A.weight") and (other := name.replace("lora_A", "lora_B")) in tensors:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            layers[layer] = tensors[name], tensors[other]
    if len(tensors) != 2 * len(layers):
        pairs = {f"base_model.model.{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
        raise BadInput(f"{file}: {min(tensors.keys() - pairs)} is no pair of A and B, and would be left out")
    return config, layers


@torch.no_grad()
def main(args: Args) -> None:
    if not (args.adapters / "adapter_config.json").is_file():
        raise BadInput(f"{args.adapters}: has no adapter_config.json; --lora-rank writes one")
    if args.output.exists():
        raise BadInput(f"{args.output}: exists already")
    config, layers = read_adapters(args.adapters)
    base = args.base or config.get("base_model_name_or_path")
    if not base:
        raise BadInput(f"{args.adapters}/adapter_config.json: names no model; give it as --base")
    base = resolve_model(base, "--base")
    load_tokenizer(base, "--base")  # refuses what is not there
    base_config = AutoConfig.from_pretrained(base)
    weights.refuse_quantized(base_config, f"--base {base}")
    if Path(base).is_dir():
        checks.check_weights(base, "--base")
    model = weights.read(causal_class(base_config), base, f"--base {base}", dtype=torch.float32)
    adaptable = {}  # name of a layer -> its weight as (out, in)
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            adaptable[name] = part.weight
        elif isinstance(part, Conv1D):  # GPT-2's weights are (in, out)
            adaptable[name] = part.weight.T
    for layer, (down, up) in layers.items():
        expected = tuple(adaptable[layer].shape) if layer in adaptable else "no linear layer"
        if (up.shape[0], down.shape[1]) != expected or down.shape[0] != up.shape[1]:
            raise BadInput(
                f"{args.adapters}: adapts {layer} from {down.shape[1]} to {up.shape[0]}, and in --base {base} it is "
                f"{expected}; give the model that the adapters were trained on as --base"
            )
        adaptable[layer].addmm_(up, down, alpha=config["lora_alpha"] / config["r"])
    dtype = base_config.dtype or torch.float32
    if args.dtype != "auto":
        dtype = getattr(torch, args.dtype)
    for parameter in model.parameters():  # buffers keep their dtype
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    # transformers refuses to write sampling defaults that it would ignore. The file is copied as it is instead.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    with folders.written_whole(args.output) as unfinished:
        model.save_pretrained(unfinished)
        checkpoint.copy_file(base, "generation_config.json", unfinished)
        AutoTokenizer.from_pretrained(args.adapters).save_pretrained(unfinished)
        for file in args.adapters.glob("*processor*.json"):  # of a model that sees images
            shutil.copy(file, unfinished)
    print(f"{len(layers)} layers adapted: {args.output}, in {str(dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
