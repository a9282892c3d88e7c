"""What some options of an EngineConfig come to: the hash function of a name, the size of the pool, the context limit.

Numbers and names only; must not know tensors or load anything heavy.
"""

from __future__ import annotations

from anaphora.config import EngineConfig
from anaphora.core.hashing import HashFunction, sha256
from anaphora.core.ids import cdiv
from anaphora.errors import ConfigError

_MEMORY_SHARE = 4  # one part in so many of the available memory is for K/V unless told otherwise
_STATE_SHARE = 4


def find_hash_function(name: str) -> HashFunction:
    """The block hash of this name. Raises ConfigError if it needs a package that is absent."""
    if name == "sha256":
        return sha256
    if name == "xxh3_128":
        try:
            import xxhash
        except ImportError:
            raise ConfigError(
                "hash_algorithm xxh3_128 needs the xxhash package: pip install xxhash, or use sha256"
            ) from None
        function: HashFunction = xxhash.xxh3_128
        return function
    raise ConfigError(f"unknown hash_algorithm {name!r}; use sha256 or xxh3_128")


def context_limit(wanted: int | None, model_limit: int, name: str) -> int:
    """Most tokens of one request: what is wanted, by default what the model can. Raises ConfigError beyond that."""
    if wanted is None:
        return model_limit
    if wanted > model_limit:
        raise ConfigError(f"max_model_len {wanted} is more than {name} can: {model_limit}; lower it, or leave it out")
    return wanted


def pool_size(
    config: EngineConfig,
    *,
    max_model_len: int,
    block_bytes: int,
    available_bytes: int,
    total_bytes: int,
    num_groups: int = 1,
) -> int:
    """Usable blocks of the pool. block_bytes: of one block. num_groups: of the cache, with a block table each.

    num_blocks if given; else as many as fit into kv_cache_bytes; else into a quarter of the available memory, and
    no more than max_num_seqs requests of max_model_len tokens could hold. Raises ConfigError if not one fits, or if
    they exceed the machine's memory.
    """
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // max(1, block_bytes)
    else:
        # Without attention layers a block takes no memory: it is an entry that remembers a beginning.
        useful = config.max_num_seqs * cdiv(max_model_len, config.block_size) * max(1, num_groups)
        num_blocks = min(available_bytes // _MEMORY_SHARE // max(1, block_bytes), useful)
    if num_blocks < 1:
        raise ConfigError(
            f"not one block of {block_bytes} bytes fits: raise kv_cache_bytes (now {config.kv_cache_bytes}), or lower "
            f"block_size (now {config.block_size})"
        )
    if num_blocks * block_bytes > total_bytes:
        raise ConfigError(
            f"a pool of {num_blocks} blocks of {block_bytes} bytes takes {num_blocks * block_bytes / 2**30:,.1f} GiB, "
            f"the machine has {total_bytes / 2**30:,.1f}: lower num_blocks or kv_cache_bytes"
        )
    return num_blocks


def state_slots(config: EngineConfig, max_num_seqs: int, state_bytes: int, *, kv_bytes: int) -> int:
    """Checkpoints of recurrent state, of so many bytes each. kv_bytes: what the pool of blocks takes.

    num_state_slots if given; else as many as fit into a quarter of kv_bytes, and one for each request that may run.
    """
    if config.num_state_slots is not None:
        return config.num_state_slots
    return max(max_num_seqs, kv_bytes // _STATE_SHARE // state_bytes)
