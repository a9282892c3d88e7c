"""From an EngineConfig to a running engine: the one place where names become objects.

Knows every plane and does no work of theirs: it sizes, names and connects.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import cast

import psutil
import torch

from anaphora.api.options import context_limit, find_hash_function, pool_size, state_slots
from anaphora.config import EngineConfig
from anaphora.core.cache_manager import CacheManager
from anaphora.core.eviction.pinned import PinLimits
from anaphora.core.groups import CacheLayout
from anaphora.core.hashing import root_digest
from anaphora.core.scheduler import Scheduler
from anaphora.core.what_if import WhatIf
from anaphora.engine.adapters import AdapterRegistry
from anaphora.engine.engine import Engine
from anaphora.engine.protocols import Tokenizer
from anaphora.engine.recorder import TraceRecorder, check_recordable
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.executor import TorchExecutor
from anaphora.runtime.feature_prompts import FeaturePrompts, rows_size
from anaphora.runtime.features import FeatureStore
from anaphora.runtime.grammar_llguidance import LLGuidanceGrammars
from anaphora.runtime.kv_cache import bytes_per_block
from anaphora.runtime.lora.files import AdapterReader
from anaphora.runtime.model import LoadedModel, load_model
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.state_cache import state_bytes
from anaphora.runtime.vision import VisionModel
from anaphora.runtime.vision_agreement import check_vision
from anaphora.runtime.vision_images import ImageLimits
from anaphora.runtime.warm_up import warm_up

_logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, *, progress: bool | None = None) -> Engine:
    """Load the model, size the pool, connect the planes.

    progress: as in `load_model`. num_threads is torch's setting for the whole process. Raises ConfigError, ModelError.
    """
    find_hash_function(config.hash_algorithm)  # what is missing is said before anything slow
    if config.record is not None:
        check_recordable(Path(config.record))
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(
        config.model,
        tokenizer=config.tokenizer,
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        cache_dir=config.cache_dir,
        progress=progress,
    )
    return connect(config, loaded, progress=progress)


def model_identity(config: EngineConfig, loaded: LoadedModel) -> dict[str, str]:
    """The fields of the root (docs/hash-format.md): what the model is, and how its K/V are kept and named."""
    how = {"arithmetic": "reproducible"} if config.reproducible else {}
    return (
        dict(loaded.identity)
        | how
        | {
            "kv_dtype": str(loaded.module.dtype).removeprefix("torch."),
            "block_size": str(config.block_size),
            "hash_algorithm": config.hash_algorithm,
        }
    )


def connect(config: EngineConfig, loaded: LoadedModel, *, progress: bool | None = None) -> Engine:
    """An engine over a model that is loaded already. Raises ConfigError, UnsupportedModelError."""
    bars = Progress(progress)
    module = loaded.module
    max_model_len = context_limit(config.max_model_len, loaded.max_model_len, loaded.name)
    layout = inspect_model(module, max_model_len)
    memory = psutil.virtual_memory()
    block_bytes = bytes_per_block(layout.places, config.block_size, module.dtype)
    num_blocks = pool_size(
        config,
        max_model_len=max_model_len,
        num_groups=len(layout.cache.groups),
        block_bytes=block_bytes,
        available_bytes=memory.available,
        total_bytes=memory.total,
    )
    max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)  # a running request is owed a token a step
    if layout.cache.groups:
        max_num_seqs = min(max_num_seqs, num_blocks)  # and holds a block
    num_state_slots = 0
    if layout.recurrent is not None:
        one = state_bytes(layout.recurrent.shapes)
        num_state_slots = state_slots(config, max_num_seqs, one, kv_bytes=num_blocks * block_bytes)
    # A tokenizer may name end tokens that the embedding never got: they cannot be chosen.
    end_token_ids = frozenset(token for token in loaded.eos_token_ids if 0 <= token < layout.vocab_size)
    grammars = None
    if loaded.tokenizer is not None:
        grammars = LLGuidanceGrammars(loaded.tokenizer, layout.vocab_size, end_token_ids)
    identity = model_identity(config, loaded)
    cache = CacheManager(
        num_blocks,
        config.block_size,
        layout=layout.cache,
        num_state_slots=num_state_slots,
        state_checkpoint_interval=config.state_checkpoint_interval,
        root=root_digest(identity),
        hash_function=find_hash_function(config.hash_algorithm),
        enable_prefix_caching=config.enable_prefix_caching,
        eviction_policy=config.eviction_policy,
        pin_limits=PinLimits(config.max_pinned_share, config.max_pinned_share_per_tenant),
        what_if=_what_if(config, num_blocks, layout.cache),
    )
    hidden_size = rows_size(module)
    vision = None if loaded.processor is None else VisionModel(module, loaded.processor)
    if vision is not None:
        check_vision(module, layout, vision)
    with bars.stage("checking how the model runs; the first time compiles kernels", brief=True):
        executor = TorchExecutor(
            module,
            layout,
            num_blocks=num_blocks + 1,  # and the null block
            block_size=config.block_size,
            max_num_seqs=max_num_seqs,
            max_table_len=min(max_model_len, cache.capacity_tokens + config.block_size),
            dtype=module.dtype,
            device=module.device,
            num_state_slots=num_state_slots,
            fast_forward=config.fast_forward,
            max_reproducible_tokens=config.max_num_batched_tokens if config.reproducible else None,
            grammars=grammars,
            features=FeatureStore(None if vision is None else vision.encode, config.feature_cache_bytes),
        )
    if config.warm_up:
        begin_s = time.perf_counter()
        with bars.stage("warming up", brief=True):
            warm_up(
                executor,
                max_num_tokens=min(config.max_num_batched_tokens, max_model_len),
                max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            )
        _logger.info("warmed up in %.1f s: a few made-up steps, not in any count", time.perf_counter() - begin_s)
    scheduler = Scheduler(
        cache,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )
    adapters = AdapterRegistry(
        AdapterReader(module, max_rank=config.max_lora_rank), executor, max_loras=config.max_loras
    )
    return Engine(
        scheduler,
        executor,
        clock=time.perf_counter,
        tokenizer=cast(Tokenizer | None, loaded.tokenizer),  # its decode gives lists only for lists of lists
        eos_token_ids=end_token_ids,
        seed=config.seed,
        grammars=grammars,
        adapters=adapters,
        recorder=_recorder(config),
        identity=identity,
        prompt_reader=FeaturePrompts(
            vision,
            ImageLimits(config.max_images, config.max_image_bytes, config.max_image_pixels),
            block_size=config.block_size,
            vocab_size=layout.vocab_size,
            hidden_size=hidden_size,
            dtype=module.dtype,
            max_tokens=min(max_model_len, cache.capacity_tokens),
        ),
    )


def _what_if(config: EngineConfig, num_blocks: int, layout: CacheLayout) -> WhatIf | None:
    """Only where the pool is all that a hit needs: of windows and recurrent states the curve knows nothing."""
    if not config.enable_prefix_caching or layout != CacheLayout():
        return None
    return WhatIf(num_blocks, config.block_size)


def _recorder(config: EngineConfig) -> TraceRecorder | None:
    if config.record is None:
        return None
    return TraceRecorder(Path(config.record), block_size=config.block_size, start_s=time.perf_counter())
