"""Write a model that sees, with random weights, for the task `squares`: python baselines/squares_model.py FOLDER

It has 0.85 M parameters and learns on a CPU. algos/sft.py then teaches it to overlook squares (baselines/README.md).
"""

import sys

import torch
from tokenizers import AddedToken
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from common.data import arithmetic
from common.data.squares import PLACES, SIDE

INITIALIZER_RANGE = 0.1  # with it the model learns to count in half as many steps as with the usual 0.02
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
# A question is sent as it stands, with the token <image> where the image is.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def processor() -> Idefics3Processor:
    """One token a character, and 16 tokens an image."""
    tokenizer = arithmetic.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token) for token in SPECIAL]})
    size = {"longest_edge": SIDE}
    to_pixels = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    return Idefics3Processor(to_pixels, tokenizer, image_seq_len=PLACES**2, chat_template=CHAT_TEMPLATE)


def new_model(folder: str, seed: int = 0) -> None:
    """Write the model with random weights and its processor."""
    torch.manual_seed(seed)
    own_processor = processor()
    text = LlamaConfig(
        vocab_size=len(own_processor.tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        initializer_range=INITIALIZER_RANGE,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": SIDE // PLACES,
        "initializer_range": INITIALIZER_RANGE,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=1,
        tie_word_embeddings=False,
        pad_token_id=0,
        image_token_id=own_processor.tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=INITIALIZER_RANGE,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    own_processor.save_pretrained(folder)


if __name__ == "__main__":
    new_model(sys.argv[1])
