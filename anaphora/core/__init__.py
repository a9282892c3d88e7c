"""The control plane of prefix caching. Standard library only: any engine can import it alone.

from anaphora.core import CacheManager, Request, Scheduler, root_digest
"""

from anaphora.core.block_pool import BlockPool
from anaphora.core.cache_manager import CacheManager
from anaphora.core.groups import AttentionKind, CacheLayout, ChunkedAttention, FullAttention, SlidingWindow
from anaphora.core.hashing import BlockChain, ExtraKey, ExtraKeyKind, root_digest, salt_key, salt_keys, sha256
from anaphora.core.hit import Hit
from anaphora.core.ids import NULL_BLOCK
from anaphora.core.invariants import InvariantError, check_cache, check_scheduler
from anaphora.core.plan import Admission, Embedding, SampledToken, ScheduledRequest, StepPlan, StepResult
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.request import Request, RequestState
from anaphora.core.scheduler import RequestUpdate, Scheduler
from anaphora.core.staged import Staged
from anaphora.core.stats import Counters, Gauges, GroupGauges, Stats

__all__ = [
    "NULL_BLOCK",
    "Admission",
    "AttentionKind",
    "BlockChain",
    "BlockPool",
    "CacheLayout",
    "CacheManager",
    "ChunkedAttention",
    "Counters",
    "Embedding",
    "ExtraKey",
    "ExtraKeyKind",
    "FullAttention",
    "Gauges",
    "GroupGauges",
    "Hit",
    "InvariantError",
    "PrefixIndex",
    "Request",
    "RequestState",
    "RequestUpdate",
    "SampledToken",
    "ScheduledRequest",
    "Scheduler",
    "SlidingWindow",
    "Staged",
    "Stats",
    "StepPlan",
    "StepResult",
    "check_cache",
    "check_scheduler",
    "root_digest",
    "salt_key",
    "salt_keys",
    "sha256",
]
