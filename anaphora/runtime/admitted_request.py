"""What the executor keeps of one admitted request: its row, and how its tokens are chosen.

Knows sampling and grammars; must not know models, batches or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anaphora.core.ids import TokenId
from anaphora.core.plan import Admission
from anaphora.errors import UnsupportedModelError
from anaphora.runtime.grammar import GrammarFactory, GrammarState
from anaphora.runtime.lora.adapter import Adapter
from anaphora.runtime.pooling import Pooler
from anaphora.runtime.sampler import SamplingRow, TokenCounts


class AdmittedRequest:
    """row: in the block tables, once it has one. prompt: its tokens, None unless their log-probabilities are wanted.

    pooler: None unless an embedding is wanted. adapter: what every token of it is computed with. features:
    what stands in it instead of token embeddings.
    """

    __slots__ = (
        "_counts",
        "_end_token_ids",
        "_grammar",
        "_may_end_at",
        "_seed",
        "adapter",
        "features",
        "pooler",
        "prompt",
        "row",
        "sampling",
    )

    def __init__(
        self,
        admission: Admission,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarFactory | None,
    ) -> None:
        sampling, num_prompt_tokens = admission.sampling, admission.num_prompt_tokens
        self.row = -1
        self.adapter: Adapter | None = None
        self.features = admission.features
        self.sampling = sampling
        self.prompt = None if sampling.prompt_logprobs is None else admission.token_ids[:num_prompt_tokens]
        self.pooler = None if sampling.pooling is None else Pooler(sampling.pooling, num_prompt_tokens)
        self._seed = admission.seed
        self._end_token_ids = admission.end_token_ids
        self._may_end_at = num_prompt_tokens + sampling.min_tokens  # the first position where it may end
        self._counts: TokenCounts | None = None
        if sampling.needs_history:
            self._counts = TokenCounts(vocab_size, num_prompt_tokens, device)
        self._grammar: GrammarState | None = None
        if sampling.is_structured:
            if grammars is None:
                raise UnsupportedModelError("this executor was made without grammars and cannot structure an output")
            self._grammar = GrammarState(grammars.matcher(sampling), num_prompt_tokens)
        self.extend(0, admission.token_ids)

    def extend(self, start: int, token_ids: Sequence[TokenId]) -> None:
        """Take in the tokens at positions [start, start + len(token_ids)); those known already are skipped."""
        if self._counts is not None:
            self._counts.extend(start, token_ids)
        if self._grammar is not None:
            self._grammar.extend(start, token_ids)

    def row_at(self, position: int) -> SamplingRow:
        """How its token at this position is chosen, all before it taken in. Raises GrammarError."""
        banned = self._end_token_ids if position < self._may_end_at else ()
        allowed = None if self._grammar is None else self._grammar.allowed()
        return SamplingRow(self.sampling, self._seed, position, self._counts, banned, allowed)
