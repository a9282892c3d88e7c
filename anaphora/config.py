"""The options of one engine, checked once, frozen. Plain data: names become objects in `anaphora.api` only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
HASH_ALGORITHMS = ("sha256", "xxh3_128")
MAX_BLOCK_SIZE = 65_536
MAX_THREADS = 1024
EVICTION_POLICIES = ("lru", "lfu", "lru-2", "s3-fifo", "cost-aware", "learnt-hazard")
SCHEDULING_POLICIES = ("fcfs", "priority")
QUANTIZATIONS = ("int8", "int4")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. The names are vLLM's where it has them.

    model: built-in name, folder, GGUF file, hub id, or a loaded `transformers` causal LM.
    tokenizer: folder, hub id, loaded tokenizer or, for a loaded model that reads images, its processor; None takes the
        model's own, if it has one.
    block_size: token positions in one block.
    num_blocks: usable blocks in the pool; the null block comes on top. None sizes the pool by kv_cache_bytes.
    kv_cache_bytes: memory for K/V when num_blocks is None; None takes a quarter of what is available now.
    num_state_slots: most checkpoints of recurrent state kept, for models that have one; None takes as many as fit into
        a quarter of the memory that the K/V blocks take, and at least one for each request that may run.
    state_checkpoint_interval: tokens after which a recurrent state is kept while a prompt is computed, rounded up to
        whole blocks: a shared beginning loses less than that the first time, and nothing later.
    max_num_batched_tokens: most tokens scheduled in one step (the budget).
    max_num_seqs: most requests running at once.
    long_prefill_token_threshold: most tokens of one request in a step, so that short prompts need not wait for a long
        one; None is the whole budget.
    max_model_len: most tokens of one request, prompt and output; None takes the model's own limit.
    enable_prefix_caching: off computes every prompt in full.
    hash_algorithm: names blocks; `sha256`, or `xxh3_128` (faster, not collision resistant: safe, as tokens
        confirm every hit; needs the `fast-hash` extra).
    eviction_policy: which cached block without an owner goes first; `lru` unless a replay of your traffic (`anaphora
        simulate`) says otherwise.
    max_pinned_share, max_pinned_share_per_tenant: most of the pool's blocks, in [0, 1], that requests may pin
        (cache_priority): all together, and those of one tenant of a server with keys.
    scheduling_policy: `fcfs`, or `priority` (lower number first, then arrival).
    dtype: of weights and K/V; `auto` is bfloat16 where the device computes in it, else float32.
    quantization: `int8` and `int4` keep the weights of linear layers in so many bits, with scales for groups of 32: a
        half and a third of bfloat16's memory and faster decode steps, for outputs that are not quite the same with
        eight bits and differ more with four; None keeps them as they are.
    device: torch device; None takes the CPU.
    max_loras: most LoRA adapters in memory, those that requests use among them; others are read again on use.
    max_lora_rank: the largest rank of an adapter.
    max_images, max_image_bytes, max_image_pixels: images in one prompt; bytes of one file; width times height of one.
    feature_cache_bytes: memory for what the vision encoder has made of images, so that the same image is not encoded
        again; what a step needs comes on top.
    fast_forward: run a decoder of a known structure in a loop of our own, and on a CPU steps of few tokens in compiled
        kernels (the `cpu` extra), if it gives the module's own results when it is loaded; off runs every model through
        the layers of `transformers`.
    reproducible: give a request the same logprobs, bit for bit, whatever is cached, chunked, preempted or batched with
        it, on the same machine with the same num_threads; what cannot hold that is refused: docs/reproducible.md.
    num_threads: torch's threads within the process; None leaves torch's choice.
    warm_up: run a few steps before the engine is handed out, so that the first request is not the one that pays for
        what happens once; None: a server does, a library does not.
    seed: where requests without a seed draw theirs from.
    cache_dir: where fetched and converted models are kept; None takes the user's cache folder.
    record: a new file that gets a line for each request (times, lengths and keyed block hashes, no text) for `anaphora
        simulate`; None records nothing.

    Raises ConfigError.
    """

    model: Any
    tokenizer: Any = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    num_state_slots: int | None = None
    state_checkpoint_interval: int = 512
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    hash_algorithm: str = "sha256"
    eviction_policy: str = "lru"
    max_pinned_share: float = 0.5
    max_pinned_share_per_tenant: float = 0.25
    scheduling_policy: str = "fcfs"
    dtype: str = "auto"
    quantization: str | None = None
    device: str | None = None
    max_loras: int = 16
    max_lora_rank: int = 64
    max_images: int = 16
    max_image_bytes: int = 20 * 1024 * 1024
    max_image_pixels: int = 4096 * 4096
    feature_cache_bytes: int = 256 * 1024 * 1024
    fast_forward: bool = True
    reproducible: bool = False
    num_threads: int | None = None
    warm_up: bool | None = None
    seed: int = 0
    cache_dir: Path | None = None
    record: Path | str | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "state_checkpoint_interval",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_loras",
            "max_lora_rank",
            "max_images",
            "max_image_bytes",
            "max_image_pixels",
            "feature_cache_bytes",
        ):
            _positive(name, getattr(self, name))
        for name in (
            "num_blocks",
            "kv_cache_bytes",
            "num_state_slots",
            "max_model_len",
            "num_threads",
            "long_prefill_token_threshold",
        ):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_bytes both size the pool: give one of them")
        for name, most in (("block_size", MAX_BLOCK_SIZE), ("num_threads", MAX_THREADS)):
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")
        for name in ("max_pinned_share", "max_pinned_share_per_tenant"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(f"{name} must be a number in [0, 1], got {share!r}")
        for name in ("enable_prefix_caching", "fast_forward", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.reproducible and not self.fast_forward:
            raise ConfigError("reproducible needs the engine's own forward pass: leave fast_forward on")
        if self.reproducible and self.quantization is not None:
            raise ConfigError(
                "reproducible needs full weights, as the kernels for others sum in an order that depends on the number "
                "of tokens: leave quantization or reproducible out"
            )
        if self.warm_up is not None and not isinstance(self.warm_up, bool):
            raise ConfigError(f"warm_up must be True, False or None, got {self.warm_up!r}")
        _choice("hash_algorithm", self.hash_algorithm, HASH_ALGORITHMS)
        _choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        _choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed must be an integer >= 0, got {self.seed!r}")
        if self.record is not None and not (isinstance(self.record, Path | str) and str(self.record)):
            raise ConfigError(f"record must be the path of a new file, got {self.record!r}")
