"""A request trace as plain data. Knows lengths and block ids; must not know files, pools or policies.

An id names a whole beginning, up to and including its block, so ids need no hashing:

    positions    0 ........ S ........ 2S ........ input_length      S: the trace's own block size
    hash_ids     [  id 0   )[  id 1   )[  id 2: partial )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.core.ids import cdiv
from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """timestamp_ms: arrival. hash_ids: ceil(input_length / trace block size); the last one may be partial."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


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

    def check_block_size(self, block_size: int) -> None:
        """Raises ConfigError unless one of the two sizes divides the other."""
        if block_size < 1 or (block_size % self.block_size and self.block_size % block_size):
            raise ConfigError(
                f"block size {block_size} does not go with {self.name}, whose ids name {self.block_size} tokens each: "
                f"choose a multiple or a divisor of {self.block_size}"
            )

    def block_ids(self, request: TraceRequest, block_size: int) -> list[int]:
        """Ids of the request's full blocks at another block size, which is a multiple or a divisor of the trace's own.

        A multiple is exact: the last id of each larger block names all before it. At a divisor the ids tell nothing
        about where inside a trace block two prompts part, so they part at its start: a lower bound of the hits.
        """
        num_full = request.input_length // block_size
        if block_size >= self.block_size:
            step = block_size // self.block_size
            return list(request.hash_ids[step - 1 : num_full * step : step])
        parts = self.block_size // block_size
        ids = [block_id * parts + part for block_id in request.hash_ids for part in range(parts)]
        return ids[:num_full]

    def num_distinct_blocks(self, block_size: int) -> int:
        """How many different full blocks there are: what an unbounded pool would come to hold."""
        return len({block_id for request in self.requests for block_id in self.block_ids(request, block_size)})

    def max_request_blocks(self, block_size: int) -> int:
        """Blocks of the largest request, prompt and output; 0 without requests."""
        return max((cdiv(r.input_length + r.output_length, block_size) for r in self.requests), default=0)
