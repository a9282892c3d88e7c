"""The options of one server, checked once, frozen. Plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from anaphora.errors import ConfigError

_MAY_BE_ZERO = ("max_queue", "token_memo_bytes")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of one server. Limits are refusals with the field named, never truncation.

    served_model_name: what replies call the model, and the only name that requests may give; None takes the engine's.
    max_queue: requests that may wait besides the max_num_seqs that run; more get 429.
    request_timeout_s: most seconds of one HTTP request; a reply that has begun ends with an error event.
    heartbeat_s: a stream that has nothing to say for so long sends a comment, so that proxies keep it.
    keep_alive_timeout_s: how long an idle connection is kept: longer than a proxy in front keeps its own (often 60 s),
        or the proxy now and then sends a request into a connection that is just being closed.
    drain_timeout_s: after SIGTERM, how long running requests may take to finish.
    max_body_bytes, max_prompts, max_n, max_messages, max_tools, max_logit_bias, max_stop_chars, max_stop_token_ids: of
        one request; max_stop_chars is of one stop string.
    max_embedding_rows: of one embedding request: an input is a row, with pooling `token` each of its tokens.
    num_text_workers: threads that tokenise and render.
    token_memo_bytes: for pieces of text and their tokens, so that what comes again is not tokenised again; 0: no memo.
    share_cache: groups of tenants who agreed to share cached beginnings; without a key file it means nothing.
    allow_remote_images: fetch http and https URLs of images, from public addresses only; else data URLs alone are read.
    remote_image_timeout_s: for all images of one request, redirects included, and waiting for its turn.
    max_remote_image_bytes: of one image. max_image_fetches: requests whose images are fetched at a time.
    open_metrics: with a key file, let anybody read /metrics; else it needs an admin key.

    Raises ConfigError.
    """

    served_model_name: str | None = None
    max_queue: int = 256
    request_timeout_s: float = 600.0
    heartbeat_s: float = 15.0
    keep_alive_timeout_s: float = 75.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_prompts: int = 256
    max_n: int = 16
    max_messages: int = 4096
    max_tools: int = 128
    max_logit_bias: int = 1024
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_embedding_rows: int = 2048
    num_text_workers: int = 2
    token_memo_bytes: int = 64 * 1024 * 1024
    share_cache: tuple[frozenset[str], ...] = ()
    open_metrics: bool = False
    allow_remote_images: bool = False
    remote_image_timeout_s: float = 10.0
    max_remote_image_bytes: int = 20 * 1024 * 1024
    max_image_fetches: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            low = 0 if field.name in _MAY_BE_ZERO else 1 if isinstance(field.default, int) else 0.001
            if not low <= value < float("inf"):
                raise ConfigError(f"{field.name} must be a finite number of at least {low}, got {value!r}")
        members = [tenant for group in self.share_cache for tenant in group]
        if len(members) != len(set(members)):
            raise ConfigError("share_cache names a tenant in two groups: give each tenant one group")
