"""A request trace as plain data. Knows lengths and block ids; must not know files, pools or policies.

An id names a whole beginning, up to and including its block, so ids need no hashing:

    positions          0 ........ S ........ 2S ........ input_length ... 3S ............ 4S   S: its block size
    hash_ids           [  id 0   )[  id 1   )[  id 2: partial )
    output_hash_ids                          [  id 3                    )[  id 4         )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.core.ids import cdiv
from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """timestamp_ms: arrival. hash_ids: ceil(input_length / trace block size); the last one may be partial.

    output_hash_ids: of the full blocks after the prompt's full ones, up to known_length; empty where nobody knows them.
    num_cached_tokens: the hit that the engine which recorded it had; None if the trace does not say.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    output_hash_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None

    @property
    def known_length(self) -> int:
        """Tokens that are computed: the last output token never is."""
        return self.input_length + max(self.output_length - 1, 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """name: what tables call it. block_size: tokens behind one id. num_skipped: lines left out as broken."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    num_skipped: int = 0

    @property
    def num_input_tokens(self) -> int:
        return sum(request.input_length for request in self.requests)

    @property
    def has_output_ids(self) -> bool:
        """Whether it says what was generated, so that later prompts may hit it."""
        return any(request.output_hash_ids for request in self.requests)

    @property
    def recorded_hit_rate(self) -> float | None:
        """What the engine had that recorded the trace; None if it does not say so of every request."""
        hits = [request.num_cached_tokens for request in self.requests]
        if not hits or any(hit is None for hit in hits):
            return None
        return sum(hit or 0 for hit in hits) / self.num_input_tokens

    def check_block_size(self, block_size: int) -> None:
        """Raises ConfigError unless one of the two sizes divides the other."""
        if block_size < 1 or (block_size % self.block_size and self.block_size % block_size):
            raise ConfigError(
                f"block size {block_size} does not go with {self.name}, whose ids name {self.block_size} tokens each: "
                f"choose a multiple or a divisor of {self.block_size}"
            )

    def block_ids(self, request: TraceRequest, block_size: int) -> list[int]:
        """Ids of the prompt's full blocks at another block size, which is a multiple or a divisor of the trace's own.

        A multiple is exact: the last id of each larger block names all before it. At a divisor the ids tell nothing
        about where inside a trace block two prompts part, so they part at its start: a lower bound of the hits.
        """
        num_full = request.input_length // block_size
        if block_size >= self.block_size:
            step = block_size // self.block_size
            return list(request.hash_ids[step - 1 : num_full * step : step])
        return self._split(request.hash_ids, block_size, num_full)

    def known_block_ids(self, request: TraceRequest, block_size: int) -> list[int]:
        """As block_ids, and those of the output's full blocks after them, as far as the trace knows them."""
        ids = self.block_ids(request, block_size)
        if request.output_hash_ids:
            whole = request.hash_ids[: request.input_length // self.block_size] + request.output_hash_ids
            num_full = request.known_length // block_size
            if block_size >= self.block_size:
                step = block_size // self.block_size
                ids += whole[(len(ids) + 1) * step - 1 : num_full * step : step]
            else:
                ids += self._split(whole, block_size, num_full)[len(ids) :]
        return ids

    def _split(self, hash_ids: Sequence[int], block_size: int, num_full: int) -> list[int]:
        parts = self.block_size // block_size
        return [block_id * parts + part for block_id in hash_ids for part in range(parts)][:num_full]

    def num_distinct_blocks(self, block_size: int, *, with_outputs: bool = False) -> int:
        """How many different full blocks it names: what an unbounded pool would come to hold of them."""
        ids = self.known_block_ids if with_outputs else self.block_ids
        return len({block_id for request in self.requests for block_id in ids(request, block_size)})

    def max_request_blocks(self, block_size: int) -> int:
        """Blocks of the largest request, prompt and output; 0 without requests."""
        return max((cdiv(r.input_length + r.output_length, block_size) for r in self.requests), default=0)
