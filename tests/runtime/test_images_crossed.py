"""Images x adapters x salts: each combination shares with itself only, and gives what the merged model gives."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from lora_world import merged, write_adapter
from safetensors.torch import load_file, save_file
from tiny_llava import make_tiny_llava, make_tiny_processor, picture

from anaphora import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
TOLERANCE, APART = 1e-3, 1e-1
TEXT = "ab<image>" + "c" * 22


def text_adapter(folder: Path, module: Any, seed: int) -> Path:
    """Of the text decoder alone: the vision tower has layers of the same names."""
    write_adapter(folder, module, seed, strength=0.3)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if "language_model" in name}, folder / "adapter_model.safetensors"
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = r".*language_model.*\.(q_proj|v_proj)"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_images_adapters_and_salts_share_with_their_own_only(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module, processor = make_tiny_llava(), make_tiny_processor()
    llm = LLM(module, tokenizer=processor, num_blocks=256, block_size=8)
    references: dict[str | None, Any] = {None: module}
    for seed, name in enumerate("xy"):
        llm.load_adapter(name, text_adapter(tmp_path / name, module, seed))
        references[name] = merged(module, tmp_path / name)

    def right(adapter: str | None, image: int, token_ids: list[int]) -> torch.Tensor:
        given = processor(text=[TEXT], images=[picture(image)], return_tensors="pt")
        with torch.inference_mode():
            ids = torch.cat([given["input_ids"], torch.tensor([token_ids])], dim=1)
            logits = references[adapter](input_ids=ids, pixel_values=given["pixel_values"], use_cache=False).logits[0]
        return torch.log_softmax(logits[given["input_ids"].shape[1] - 1 : -1], dim=-1)[range(len(token_ids)), token_ids]

    combinations = list(itertools.product((None, "x", "y"), (1, 2), (None, "x")))  # a salt named like an adapter
    for salt_hit in (0, 32):
        for adapter, image, salt in combinations:
            prompt = {"prompt": TEXT, "images": [picture(image)]}
            (output,) = llm.generate(prompt, PARAMS, adapter=adapter, cache_salt=salt)
            assert output.error is None and output.num_cached_tokens == salt_hit
            completion = output.outputs[0]
            given = torch.tensor([next(iter(entry.values())).logprob for entry in completion.logprobs])
            for other_adapter, other_image in itertools.product(references, (1, 2)):
                difference = float((right(other_adapter, other_image, completion.token_ids) - given).abs().max())
                is_own = (other_adapter, other_image) == (adapter, image)
                assert difference < TOLERANCE if is_own else difference > APART
    assert llm.engine._executor.features.num_encoded == 2
