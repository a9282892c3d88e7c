"""What is measured: the cells of the sweep, the rows beside it and the counter-examples, as data.

Knows sizes in tokens; must not know targets, prompts or times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from anaphora.errors import ConfigError

COUNTER_EXAMPLES = {
    "exact-repeat": "the same prompt again: a hit, or the others prove nothing",
    "first-token-differs": "all but the first token is the same: no hit",
    "other-salt": "the same prompt with another cache salt: no hit",
    "evicted-before": "the same prompt after other prompts have filled the pool: no hit",
}
"""Kind -> what is expected, in words."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell. Sizes in tokens.

    A prompt is prefix_tokens that the requests of a wave share, and suffix_tokens of its own. interference: tokens of
    other prompts that come before the hit, as a share of the pool.
    kind: `sweep`, `sharers`, `decode`, or one of COUNTER_EXAMPLES.
    """

    prefix_tokens: int
    output_tokens: int
    concurrency: int
    interference: float = 0.0
    suffix_tokens: int = 32
    kind: str = "sweep"

    @property
    def name(self) -> str:
        """Unique among the cases of a plan."""
        sizes = f"{self.prefix_tokens}+{self.suffix_tokens}/{self.output_tokens} x{self.concurrency}"
        other = f" other {self.interference:g}" if self.interference else ""
        return f"{self.kind} {sizes}{other}"

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.suffix_tokens

    @property
    def is_counter_example(self) -> bool:
        return self.kind in COUNTER_EXAMPLES

    @property
    def expects_hit(self) -> bool:
        """Of a counter-example."""
        return self.kind == "exact-repeat"

    @property
    def num_warm_waves(self) -> int:
        """Hits are cheap and their spread matters, but others may have evicted the prefix only before the first."""
        return 3 if self.output_tokens == 1 and self.concurrency == 1 and not self.interference else 1

    @property
    def measures_suffix(self) -> bool:
        """Whether a cold prompt as long as the suffix is measured beside the hit (hit efficiency)."""
        return self.output_tokens == 1 and self.concurrency == 1 and not self.interference

    @property
    def pool_tokens(self) -> int:
        """A pool in which this case evicts nothing: one wave in full, and what the others add to it."""
        of_its_own = self.suffix_tokens + self.output_tokens + 32
        return self.concurrency * (self.prompt_tokens + self.output_tokens + 2 * self.num_warm_waves * of_its_own) + 128


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Cases that are measured on the same engines, in turn: rounds over all of them."""

    cases: tuple[Case, ...]

    @property
    def pool_tokens(self) -> int:
        return max(case.pool_tokens for case in self.cases)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every combination of these, and the rows beside it. Raises ConfigError.

    prefixes, outputs, suffix: tokens. concurrency: requests sent at once. interference: shares of the pool; 0 is none.
    sharers: requests at once with one beginning of the longest prefix, `sharers_output` tokens each.
    decode_output: tokens of the row that decodes at the longest prefix; 0 leaves it out.
    counter_examples: whether those are run, at the middle prefix.
    """

    prefixes: tuple[int, ...] = (128, 512, 2048)
    outputs: tuple[int, ...] = (1, 32, 256)
    concurrency: tuple[int, ...] = (1, 8)
    interference: tuple[float, ...] = (0.0, 1.25)
    suffix: int = 32
    sharers: tuple[int, ...] = (1, 2, 4, 8)
    sharers_output: int = 64
    decode_output: int = 64
    counter_examples: bool = True

    def __post_init__(self) -> None:
        for name in ("prefixes", "outputs", "concurrency"):
            values = getattr(self, name)
            if not values or any(value < 1 for value in values):
                raise ConfigError(f"{name} must be integers >= 1, got {', '.join(map(str, values)) or 'none'}")
        if any(value < 1 for value in self.sharers):
            raise ConfigError("sharers must be integers >= 1")
        if self.suffix < 1:
            raise ConfigError(f"suffix must be at least 1 token, got {self.suffix}")
        if any(not 0 <= share <= 100 for share in self.interference) or not self.interference:
            raise ConfigError("interference must be shares of the pool in [0, 100]; 0 is none")

    def groups(self) -> list[PoolGroup]:
        """Small pools, which others evict, come first: a time budget then takes rounds from the cheap plain cells."""
        cells = [
            Case(prefix, output, at_once, share, self.suffix)
            for prefix, at_once, output, share in product(
                self.prefixes, self.concurrency, self.outputs, self.interference
            )
        ]
        small: dict[tuple[int, int], list[Case]] = {}
        plain = [case for case in cells if not case.interference]
        for case in cells:
            if case.interference:
                small.setdefault((case.prefix_tokens, case.concurrency), []).append(case)
        plain += [
            Case(max(self.prefixes), self.sharers_output, sharers, 0.0, self.suffix, "sharers")
            for sharers in self.sharers
        ]
        if self.decode_output:
            plain.append(Case(max(self.prefixes), self.decode_output, 1, 0.0, self.suffix, "decode"))
        if self.counter_examples:
            middle = sorted(self.prefixes)[len(self.prefixes) // 2]
            small.setdefault((middle, 1), []).extend(self._counter_examples(middle))
        return [PoolGroup(tuple(cases)) for cases in [*small.values(), plain] if cases]

    def _counter_examples(self, prefix: int) -> list[Case]:
        share = max(1.25, *self.interference)
        base = Case(prefix, 1, 1, 0.0, self.suffix)
        return [
            replace(base, kind=kind, interference=share if kind == "evicted-before" else 0.0)
            for kind in COUNTER_EXAMPLES
        ]


def quick_sweep() -> list[PoolGroup]:
    """The most telling cells, for two minutes on two cores with a model of 135M parameters."""
    plain = [Case(prefix, 1, 1) for prefix in (128, 512, 2048)]
    plain += [Case(512, 32, 1, kind="decode"), Case(128, 32, 8, kind="sharers")]
    evicting = Sweep(
        prefixes=(128,), outputs=(1,), concurrency=(1,), interference=(1.25,), sharers=(), decode_output=0
    ).groups()
    return [*evicting, PoolGroup(tuple(plain))]


def all_cases(groups: Sequence[PoolGroup]) -> list[Case]:
    return [case for group in groups for case in group.cases]
