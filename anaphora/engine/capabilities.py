"""What an engine takes and what it can run: nothing here but the root changes while it lives, so any thread may ask.

Knows a scheduler's limits, what an executor offers, and a tokenizer; must not know requests that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anaphora.core.scheduler import Scheduler
from anaphora.engine.multimodal import PreparedPrompt, Prompt, PromptReader
from anaphora.engine.prompt_check import check_grammar, encode
from anaphora.engine.protocols import Executor, GrammarChecker, Tokenizer
from anaphora.errors import InvalidParameterError, PromptTooLongError
from anaphora.sampling_params import SamplingParams

MAX_CHARS_PER_TOKEN = 128
"""A text of more characters per token that may run is refused before it is tokenised: words are shorter."""


class Capabilities:
    """The part of an engine that is fixed. See `Engine` for the arguments."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None,
        grammars: GrammarChecker | None,
        prompt_reader: PromptReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = executor.vocab_size
        self._scheduler = scheduler
        self._executor = executor
        self._grammars = grammars
        self._prompt_reader = prompt_reader

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of one request, prompt and output; None if nothing but the pool limits it."""
        return self._scheduler.max_model_len

    @property
    def block_size(self) -> int:
        return self._scheduler.cache.block_size

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        return self._scheduler.cache.pool.num_blocks

    @property
    def kv_cache_bytes(self) -> int | None:
        """Memory of the pool; None if the executor holds none (a simulator)."""
        return getattr(self._executor, "kv_cache_bytes", None)

    @property
    def kv_bytes_per_token(self) -> tuple[int, ...] | None:
        """What one token takes in each group of the cache; None if the executor holds no memory."""
        return getattr(self._executor, "kv_bytes_per_token", None)

    @property
    def weights_bytes(self) -> int | None:
        """Memory of the model's weights; None if the executor holds none."""
        return getattr(self._executor, "weights_bytes", None)

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of one request that the pool can hold."""
        return self._scheduler.cache.capacity_tokens

    @property
    def root(self) -> bytes:
        """Digest of what the model is: the parent of every first block. New weights give another one."""
        return self._scheduler.cache.root

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Whether a prompt of this length can ever run; the answer never changes. Raises PromptTooLongError."""
        self._scheduler.check_fits(num_prompt_tokens)

    def check_text_fits(self, text: str) -> None:
        """Whether a text can be short enough, before minutes are spent on its tokens. Raises PromptTooLongError."""
        limit = min(self.max_model_len or self.capacity_tokens, self.capacity_tokens)
        if len(text) > limit * MAX_CHARS_PER_TOKEN:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, far more than {limit} tokens can hold, to which the context "
                "(max_model_len) or the pool (num_blocks) limits a request; shorten it"
            )

    def check_grammar(self, sampling: SamplingParams) -> None:
        """Whether the structured output that these parameters ask for can be given, if they ask for one.

        Slow for a large schema that is new. `add_request` does it too; a server asks first, on another thread, which is
        allowed for this method. Raises InvalidParameterError.
        """
        check_grammar(sampling, self._grammars)

    def check_pooling(self, sampling: SamplingParams) -> None:
        """Whether the embedding that these parameters ask for can be given, if they ask for one.

        May be called from any thread. Raises InvalidParameterError.
        """
        if sampling.pooling is None:
            return
        check = getattr(self._executor, "check_pooling", None)
        if check is None:
            raise InvalidParameterError("pooling needs hidden states, and this executor computes none")
        check(sampling.pooling)

    @property
    def image_token(self) -> str | None:
        """What stands in a text prompt for each image; None if the model reads no images."""
        return None if self._prompt_reader is None else self._prompt_reader.image_token

    def check_num_images(self, count: int, field: str) -> None:
        """Raises InvalidParameterError if they are too many for one prompt."""
        most = 0 if self._prompt_reader is None else self._prompt_reader.max_images
        if count > most:
            raise InvalidParameterError(f"{field} has {count} images, at most {most} are allowed (max_images)")

    def read_prompt(self, prompt: Mapping[str, Any], *, add_special_tokens: bool = True) -> PreparedPrompt:
        """A prompt with images or rows of embeddings, ready for `add_request`, which does it too; docs/multimodal.md.

        Slow, and allowed on any thread. Raises InvalidParameterError, InvalidTokenError, EmptyPromptError,
        PromptTooLongError.
        """
        if self._prompt_reader is None:
            raise InvalidParameterError("a prompt must be a string or a list of token ids: this engine takes no other")
        if isinstance(text := prompt.get("prompt"), str):
            self.check_text_fits(text)
        return self._prompt_reader.read(prompt, add_special_tokens=add_special_tokens)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Sequence[int] | PreparedPrompt:
        """The token ids of a text prompt; token ids as they are; anything else made ready.

        Raises InvalidParameterError, PromptTooLongError, and what `read_prompt` raises.
        """
        if isinstance(prompt, PreparedPrompt):
            if prompt.block_size != self.block_size:  # its keys would enter other blocks than those they are about
                raise InvalidParameterError(
                    f"the prompt was read for blocks of {prompt.block_size} tokens, and this engine has blocks of "
                    f"{self.block_size}: read it with this engine"
                )
            return prompt
        if isinstance(prompt, str):
            self.check_text_fits(prompt)
        if isinstance(prompt, Mapping):
            return self.read_prompt(prompt, add_special_tokens=add_special_tokens)
        return encode(prompt, self.tokenizer, add_special_tokens=add_special_tokens)
