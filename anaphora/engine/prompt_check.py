"""Is this prompt, and are these parameters, something that the model can run? Knows the size of the vocabulary.

Everything here answers before anything is kept, with an error that says what to do. Checks over a whole prompt are
passes at C speed: a long prompt is checked in a small part of the time that hashing it takes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral

from anaphora.engine.protocols import GrammarChecker, Tokenizer
from anaphora.errors import EmptyPromptError, InvalidParameterError, InvalidTokenError
from anaphora.sampling_params import SamplingParams


def check_text(name: str, text: str) -> None:
    """Raises InvalidParameterError if the text holds half a surrogate pair: no tokenizer can encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{name} is not valid Unicode: a lone surrogate at character {error.start}; decode the text properly first"
        ) from None


def encode(prompt: str | Sequence[int], tokenizer: Tokenizer | None, *, add_special_tokens: bool) -> Sequence[int]:
    """The token ids of a text prompt; token ids as they are. Raises InvalidParameterError."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidParameterError(
            "a text prompt needs a tokenizer and this model has none: load one (tokenizer=...), or give token ids"
        )
    check_text("the prompt", prompt)
    return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def check_token_ids(token_ids: object, vocab_size: int) -> list[int]:
    """The prompt as plain integers, all in [0, vocab_size).

    token_ids: a sequence of integers, or a one-dimensional integer array of any library (`tolist`).
    Raises EmptyPromptError, InvalidTokenError, and InvalidParameterError if it is no such sequence.
    """
    if hasattr(token_ids, "tolist") and not isinstance(token_ids, memoryview):
        # numpy, torch and array.array: to Python integers in one call
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray | memoryview):
        raise InvalidParameterError(
            f"a prompt must be a string or a list of token ids, got {type(token_ids).__name__}; "
            "give several prompts as a list of them"
        )
    if not len(token_ids):
        raise EmptyPromptError("the prompt has no tokens; give at least one")
    for kind in set(map(type, token_ids)):
        if issubclass(kind, bool) or not issubclass(kind, Integral):
            index = next(i for i, token_id in enumerate(token_ids) if type(token_id) is kind)
            raise InvalidTokenError(
                f"token ids must be integers, got {token_ids[index]!r} ({kind.__name__}) at position {index}"
            )
    checked: list[int] = list(map(operator.index, token_ids))
    if min(checked) < 0 or max(checked) >= vocab_size:
        index = next(i for i, token_id in enumerate(checked) if not 0 <= token_id < vocab_size)
        raise InvalidTokenError(
            f"token id {checked[index]} at position {index} is outside the model's vocabulary [0, {vocab_size})"
        )
    return checked


def check_sampling(sampling: object, vocab_size: int, *, has_tokenizer: bool) -> SamplingParams:
    """Raises InvalidParameterError for what only the model can tell: token ids it has not, text without a tokenizer."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidParameterError(f"sampling parameters must be SamplingParams, got {type(sampling).__name__}")
    if sampling.n > 1:
        raise InvalidParameterError(
            f"the step engine gives one sequence a request, got n={sampling.n}: add one request for each of "
            "sampling.choices(), or use LLM.generate"
        )
    for name, token_ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidParameterError(
                f"{name} names token {max(token_ids)}, which is outside the model's vocabulary [0, {vocab_size})"
            )
    if sampling.stop and not has_tokenizer:
        raise InvalidParameterError(
            "stop strings need a tokenizer and this model has none: load one (tokenizer=...), or use stop_token_ids"
        )
    return sampling


def check_grammar(sampling: SamplingParams, grammars: GrammarChecker | None) -> None:
    """Raises InvalidParameterError if a structured output is wanted that cannot be given."""
    if not sampling.is_structured:
        return
    if grammars is None:
        field = "regex" if sampling.json_schema is None else "json_schema"
        raise InvalidParameterError(f"{field} needs a tokenizer and this model has none: load one (tokenizer=...)")
    grammars.check(sampling)


def check_priority(priority: object) -> int:
    """Raises InvalidParameterError."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidParameterError(f"priority must be an integer (lower runs first), got {priority!r}")
    return priority
