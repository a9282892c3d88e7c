"""A GGUF file of a few kilobytes: a two-layer Llama with a byte-level vocabulary and a chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

CHAT_TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2


def byte_characters() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes, in the order of the bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tiny_gguf(path: Path, *, seed: int = 0, tokenizer: bool = True, quantization: str = "F32") -> Path:
    """Write the file. Token ids: 0 end, 1 `<|user|>`, 2 to 257 the bytes, 258 a doubled newline."""
    characters = byte_characters()
    newline = characters[10]
    tokens = ["<|end|>", "<|user|>", *characters, newline * 2]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
        writer.add_token_merges([f"{newline} {newline}"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) * 0.2
        kind = gguf.GGMLQuantizationType[quantization if len(shape) == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
