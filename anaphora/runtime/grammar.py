"""What structured output asks of a grammar library, and where a request stands in its grammar.

Knows token ids and masks; must not know which library follows the grammar, nor models or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from anaphora.core.ids import TokenId
from anaphora.sampling_params import SamplingParams


class GrammarError(Exception):
    """A grammar cannot be followed any further: a limit of its library, or a token outside it."""


class GrammarMatcher(Protocol):
    """One output and the place in its grammar where it stands. After GrammarError it is of no more use."""

    def accept(self, token_ids: Sequence[TokenId]) -> None:
        """Go on by these tokens. Raises GrammarError."""
        ...

    def allowed(self) -> torch.Tensor:
        """[vocab] bool on the CPU, the tokens that may come next: never none. Raises GrammarError.

        End tokens among them where the output is complete.
        """
        ...


class GrammarFactory(Protocol):
    """Makes matchers. One for each engine."""

    def check(self, sampling: SamplingParams) -> None:
        """See engine.protocols.GrammarChecker."""
        ...

    def matcher(self, sampling: SamplingParams) -> GrammarMatcher:
        """At the beginning of the output. Raises InvalidParameterError."""
        ...


class GrammarState:
    """A matcher that follows the outputs of one request as they are scheduled, each once."""

    def __init__(self, matcher: GrammarMatcher, num_prompt_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_prompt_tokens
        self._error: GrammarError | None = None

    def extend(self, start: int, token_ids: Sequence[TokenId]) -> None:
        """Take in the tokens at positions [start, start + len(token_ids)); those known already are skipped."""
        new = token_ids[max(0, self._num_tokens - start) :]
        if not new or self._error is not None:
            return
        self._num_tokens += len(new)
        try:
            self._matcher.accept(new)
        except GrammarError as error:
            self._error = error

    def allowed(self) -> torch.Tensor:
        """See GrammarMatcher."""
        if self._error is not None:
            raise self._error
        return self._matcher.allowed()
