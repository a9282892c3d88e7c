"""Which cached block goes next: one seam (`base`), one file a policy, and their names."""

from anaphora.core.eviction.base import EvictionPolicy, PolicyFactory
from anaphora.core.eviction.cost_aware import CostAware
from anaphora.core.eviction.learnt_hazard import LearntHazard
from anaphora.core.eviction.lfu import AgeingLFU
from anaphora.core.eviction.lru import LRU
from anaphora.core.eviction.lru_k import LRU2
from anaphora.core.eviction.s3_fifo import S3FIFO
from anaphora.errors import ConfigError

__all__ = ["POLICIES", "EvictionPolicy", "PolicyFactory", "policy_factory"]

POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "lfu": AgeingLFU,
    "lru-2": LRU2,
    "s3-fifo": S3FIFO,
    "cost-aware": CostAware,
    "learnt-hazard": LearntHazard,
}
"""Name -> what makes the policy. The first one is the default."""


def policy_factory(name: str) -> PolicyFactory:
    """Raises ConfigError for a name that is not in POLICIES."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
