"""A tiny LLaVA with random weights, its real processor over the tokenizer of bytes, and images made of a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_tokenizer import make_tiny_tokenizer
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

VOCAB_SIZE = 384
IMAGE_TOKENS = 16
"""Of each image: 4 x 4 patches of 7 x 7 pixels."""
IMAGE = "<image>"
IMAGE_ID = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_llava(seed: int = 7) -> LlavaForConditionalGeneration:
    """float32; every matrix, and the class embedding, is randn * 0.2, or what an image shows would hardly matter."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=7,
            projection_dim=16,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
        image_token_index=IMAGE_ID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
    )
    model = LlavaForConditionalGeneration(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or name.endswith("class_embedding"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def make_tiny_processor(**image_options: Any) -> LlavaProcessor:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    size = {"height": 28, "width": 28}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(**({"size": size, "crop_size": size} | image_options)),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny_llava(folder: Path) -> Path:
    make_tiny_llava().save_pretrained(folder)
    make_tiny_processor().save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Coarse noise: what differs is seen after any resizing."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST)
