"""Grammars by way of llguidance (the extra `structured`): JSON schemas and regular expressions.

The only module that knows the library. It is loaded, and the tokenizer made known to it, when it is first needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from anaphora.core.ids import TokenId
from anaphora.errors import InvalidParameterError
from anaphora.runtime.grammar import GrammarError
from anaphora.sampling_params import SamplingParams

# Between JSON's tokens: what models write by themselves, and no endless white space.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}
MAX_KEPT = 64
MAX_ERROR_CHARS = 300


class LLGuidanceMatcher:
    """Implements runtime.grammar.GrammarMatcher."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token_ids: Sequence[TokenId]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(f"the output has left its grammar: {_brief(self._matcher.get_error())}")

    def allowed(self) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_brief(self._matcher.get_error())}")
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not mask.any():
            raise GrammarError("the grammar allows no token of this vocabulary here")
        return torch.from_numpy(mask)


class LLGuidanceGrammars:
    """Implements runtime.grammar.GrammarFactory, for one tokenizer.

    tokenizer: of `transformers`, a fast one. vocab_size: of the masks. end_token_ids: of the model.
    The last MAX_KEPT grammars stay compiled. May be called from several threads.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._library_tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()  # never consumed: each request has a copy
        self._lock = threading.Lock()

    def check(self, sampling: SamplingParams) -> None:
        """Whether the grammar that these parameters ask for can be followed. Raises InvalidParameterError."""
        if sampling.is_structured:
            self._compile(sampling)

    def matcher(self, sampling: SamplingParams) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._compile(sampling).deep_copy(), self._vocab_size)

    def _compile(self, sampling: SamplingParams) -> Any:
        field = "regex" if sampling.json_schema is None else "json_schema"
        text: str = getattr(sampling, field)
        with self._lock:
            compiled = self._compiled.get((field, text))
        if compiled is None:
            compiled = self._new_matcher(field, text)  # may take a second: nobody waits for it but who asked
        with self._lock:
            self._compiled[field, text] = compiled
            self._compiled.move_to_end((field, text))
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _new_matcher(self, field: str, text: str) -> Any:
        library = _library(field)
        if self._library_tokenizer is None:
            self._library_tokenizer = self._make_library_tokenizer(field)
        if field == "regex":
            grammar = library.LLMatcher.grammar_from_regex(text)
        else:
            grammar = library.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        matcher = library.LLMatcher(self._library_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidParameterError(f"{field} cannot be followed: {_brief(matcher.get_error())}")
        try:  # the library compiles grammars that nothing fits, such as a schema that is its own reference
            LLGuidanceMatcher(matcher.deep_copy(), self._vocab_size).allowed()
        except GrammarError as error:
            raise InvalidParameterError(f"{field} describes no output: {error}") from None
        return matcher

    def _make_library_tokenizer(self, field: str) -> Any:
        if not self._end_token_ids:
            raise InvalidParameterError(f"{field} needs a model with an end token, and this one has none: use another")
        from llguidance.hf import from_tokenizer

        size = max(self._vocab_size, len(self._tokenizer), 1 + max(self._end_token_ids))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._end_token_ids)
        except Exception as error:  # the library refuses in several ways what it cannot read
            raise InvalidParameterError(
                f"{field} is not supported with this model's tokenizer ({error}): leave it out, or use another model"
            ) from error


def _library(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidParameterError(
            f"{field} needs the llguidance package, which is not installed here: pip install llguidance"
        ) from None
    return llguidance


def _brief(error: str) -> str:
    text = " ".join(error.split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
