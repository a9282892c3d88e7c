"""Which cached block goes next: one seam (`base`), one file a policy, and their names."""

from anaphora.core.eviction.base import EvictionPolicy, PolicyFactory
from anaphora.core.eviction.lru import LRU
from anaphora.errors import ConfigError

__all__ = ["POLICIES", "EvictionPolicy", "PolicyFactory", "policy_factory"]

POLICIES: dict[str, PolicyFactory] = {"lru": LRU}
"""Name -> what makes the policy. The first one is the default."""


def policy_factory(name: str) -> PolicyFactory:
    """Raises ConfigError for a name that is not in POLICIES."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
