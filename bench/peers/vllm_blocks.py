"""vLLM's own control plane behind four calls, for `bench/control_plane.py --beside vllm`. Written against 0.32.

Its `Request`, block hasher and `KVCacheManager`, as its scheduler calls them: one group of full attention, SHA-256 (its
default hash), no events. Blocks are made findable where they are allocated, so there is no call to commit.
"""

from __future__ import annotations

import logging

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

logging.getLogger("vllm").setLevel(logging.ERROR)


class VllmCache:
    """num_blocks: usable ones; vLLM counts its null block among its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(block_size, hash_function)
        self._params = SamplingParams(max_tokens=1)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config,
            max_model_len=num_blocks * block_size,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )

    def make_request(self, name: str, tokens: list[int]) -> Request:
        """Hashed as it is made."""
        return Request(name, tokens, self._params, None, block_hasher=self._hasher)

    def look_up(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """(blocks, tokens)."""
        blocks, num_tokens, _ = self._manager.get_computed_blocks(request)
        return blocks, num_tokens

    def allocate(self, request: Request, hit: tuple[KVCacheBlocks, int]) -> None:
        blocks, num_tokens = hit
        new = self._manager.allocate_slots(request, request.num_tokens - num_tokens, num_tokens, blocks)
        if new is None:
            raise MemoryError("the pool does not hold this request")

    def free(self, request: Request) -> None:
        self._manager.free(request)

    def reset(self) -> None:
        if not self._manager.reset_prefix_cache():
            raise RuntimeError("vLLM holds blocks that nobody gave back")
