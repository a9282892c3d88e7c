"""The control plane of prefix caching. Standard library only: any engine can import it alone.

from anaphora.core import CacheManager, Request, Scheduler, root_digest
"""

from anaphora.core.block_pool import BlockPool
from anaphora.core.cache_manager import CacheManager, Hit
from anaphora.core.hashing import BlockChain, ExtraKey, ExtraKeyKind, root_digest, salt_key, sha256
from anaphora.core.ids import NULL_BLOCK
from anaphora.core.invariants import InvariantError, check_cache, check_scheduler
from anaphora.core.plan import Admission, Embedding, SampledToken, ScheduledRequest, StepPlan, StepResult
from anaphora.core.prefix_index import PrefixIndex
from anaphora.core.request import Request, RequestState
from anaphora.core.scheduler import RequestUpdate, Scheduler
from anaphora.core.stats import Counters, Gauges, Stats

__all__ = [
    "NULL_BLOCK",
    "Admission",
    "BlockChain",
    "BlockPool",
    "CacheManager",
    "Counters",
    "Embedding",
    "ExtraKey",
    "ExtraKeyKind",
    "Gauges",
    "Hit",
    "InvariantError",
    "PrefixIndex",
    "Request",
    "RequestState",
    "RequestUpdate",
    "SampledToken",
    "ScheduledRequest",
    "Scheduler",
    "Stats",
    "StepPlan",
    "StepResult",
    "check_cache",
    "check_scheduler",
    "root_digest",
    "salt_key",
    "sha256",
]
