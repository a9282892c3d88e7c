"""What the context limit and the size of the pool forbid: prompts that can never run, and outputs that may not go on.

Knows lengths and end tokens; must not know who runs, or what is free now.
"""

from __future__ import annotations

from anaphora.core.cache_manager import CacheManager
from anaphora.core.request import Request
from anaphora.errors import PromptTooLongError


def check_fits(num_prompt_tokens: int, max_model_len: int | None, cache: CacheManager) -> None:
    """Refuse at once what can never run, whatever is cached. Raises PromptTooLongError."""
    if max_model_len is not None and num_prompt_tokens >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens, but prompt and output together may have "
            f"{max_model_len} (max_model_len); shorten it to {max_model_len - 1} or less"
        )
    if num_prompt_tokens > cache.capacity_tokens:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens, but the whole pool holds {cache.capacity_tokens} "
            f"({cache.pool.num_blocks} blocks of {cache.block_size}{_shared_by(cache)}); shorten it or raise num_blocks"
        )


def finish_reason(request: Request, token_id: int, max_model_len: int | None, cache: CacheManager) -> str | None:
    """Why a request ends with the token that was just appended; None if it goes on. Sets its stop_reason."""
    if request.num_output_tokens > request.sampling.min_tokens:
        if token_id in request.eos_token_ids:
            return "stop"
        if token_id in request.sampling.stop_token_ids:
            request.stop_reason = token_id
            return "stop"
    if request.num_output_tokens >= request.sampling.max_tokens:
        return "length"
    if max_model_len is not None and request.num_tokens >= max_model_len:
        return "length"
    # The last token's K/V are never needed, so one token more than the pool holds can be known.
    return "length" if request.num_tokens > cache.capacity_tokens else None


def _shared_by(cache: CacheManager) -> str:
    num_groups = len(cache.layout.groups)
    return f", shared by {num_groups} groups of layers" if num_groups > 1 else ""
