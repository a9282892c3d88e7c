"""Where prompts come from: random token ids that follow from a seed and a name, the same in every run.

Random ids keep tokenizers out of the measurement and make every beginning new. As text they are common words, about
one token each, for servers that take no ids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.errors import ConfigError

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name president team minute idea kid body information back parent face others level office door "
    "health person art war history party result change morning reason research girl guy moment air "
    "teacher force education foot boy age policy music market sense nation plan college interest death "
    "experience effect use class control field development role effort rate heart drug show leader light"
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids in [low, high). Raises ConfigError."""

    seed: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise ConfigError(
                f"the token range {self.low}:{self.high} is empty or negative: give LOW:HIGH inside the vocabulary"
            )

    def draw(self, name: str, count: int) -> tuple[int, ...]:
        """`count` ids that depend on the seed, the range and the name only."""
        rng = random.Random(f"{self.seed}:{self.low}:{self.high}:{name}")
        return tuple(rng.randrange(self.low, self.high) for _ in range(count))

    def other(self, token_id: int) -> int:
        """An id of the range that is not this one."""
        return self.low if token_id != self.low else self.low + 1


def as_text(token_ids: Sequence[int]) -> str:
    """One common word for each id; ids that differ may give the same word."""
    words = _WORDS.split()
    return " ".join(words[token_id % len(words)] for token_id in token_ids)
