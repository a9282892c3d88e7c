"""What kinds of layers a model has, as far as its cache goes. Standard library only: an executor reads it, too.

A **group** is the layers that share one block table. An attention kind is one function: the earliest position that a
token sees. It never falls as the position grows, and everything follows from it: which blocks a hit needs, and which
blocks a running request may give back. A block of any group takes the same memory, so all groups share one pool.

    keys of a request     0 ........ first_visible(p) ........ p
                          [ given back )[ a token at p sees    ]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from anaphora.errors import ConfigError


class AttentionKind(Protocol):
    """Which earlier positions a token sees. Implementations are frozen and compare by value."""

    def first_visible(self, position: int) -> int:
        """The earliest position that a token at `position` sees: in [0, position], never falling."""
        ...

    @property
    def span(self) -> int | None:
        """The most positions that a token sees, its own among them; None if there is no such number."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every position sees every earlier one."""

    def __str__(self) -> str:
        return "full attention"

    @property
    def span(self) -> None:
        return None

    def first_visible(self, position: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token sees the last `size` positions, its own among them. Raises ConfigError."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a sliding window has at least one token, got {self.size}")

    def __str__(self) -> str:
        return f"sliding window of {self.size}"

    def first_visible(self, position: int) -> int:
        return max(0, position - self.size + 1)

    @property
    def span(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """A token sees its own chunk of `size` positions, up to itself. Raises ConfigError."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a chunk has at least one token, got {self.size}")

    def __str__(self) -> str:
        return f"chunks of {self.size}"

    def first_visible(self, position: int) -> int:
        return position // self.size * self.size

    @property
    def span(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model.

    groups: the attention groups, each with a block table of its own; several may be of one kind. At most one is full
        attention, and it comes first.
    has_state: whether layers carry a recurrent state. It is kept as checkpoints at block boundaries, in slots of their
        own.
    Raises ConfigError.
    """

    groups: tuple[AttentionKind, ...] = field(default_factory=lambda: (FullAttention(),))
    has_state: bool = False

    def __post_init__(self) -> None:
        if not self.groups and not self.has_state:
            raise ConfigError("a model without attention and without a state has nothing to cache")
        if any(isinstance(kind, FullAttention) for kind in self.groups[1:]):
            raise ConfigError("only the first group may be full attention; give its layers one block table")

    @property
    def has_spine(self) -> bool:
        """Whether there is full attention: then its group is the spine, by whose content the cache is searched."""
        return bool(self.groups) and isinstance(self.groups[0], FullAttention)

    @property
    def side_groups(self) -> tuple[AttentionKind, ...]:
        return self.groups[1:] if self.has_spine else self.groups
