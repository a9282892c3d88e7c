"""How one request wants its tokens chosen. Plain data; the names are vLLM's and OpenAI's.

Knows nothing of tensors: `runtime.sampler` gives these fields their arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from anaphora.errors import InvalidParameterError
from anaphora.pooling_params import PoolingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_GRAMMAR_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
MAX_CACHE_PRIORITY = 9
MAX_PIN_TTL_S = 86_400.0
DEFAULT_PIN_TTL_S = 300.0


def _number(name: str, value: object, low: float, high: float, hint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidParameterError(f"{name} must be a finite number, got {value!r}; {hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidParameterError(f"{name} must be a finite number, got {value!r}; {hint}")
    if not low <= number <= high:
        raise InvalidParameterError(f"{name} must be {hint}, got {value!r}")
    return number


def _integer(name: str, value: object, low: int, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise InvalidParameterError(f"{name} must be {hint}, got {value!r}")
    return int(value)


def _integers(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidParameterError(f"{name} must be a list of token ids, got {values!r}")
    return tuple(_integer(name, value, 0, "a list of token ids (integers >= 0)") for value in values)


def _json_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)  # the order of its properties is the order in the output
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(f"json_schema is no JSON: {error}") from None


def _check_schema(text: str) -> None:
    """Whether it is a JSON object of bounded depth. What the schema says is checked by who follows it."""
    try:
        level: list[object] = [json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"json_schema is no JSON: {error}") from None
    if not isinstance(level[0], dict):
        raise InvalidParameterError(f"json_schema must be a JSON object, got {type(level[0]).__name__}")
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise InvalidParameterError(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} levels deep: make it flatter")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Validated when made.

    n: sequences for one prompt, which is computed once. Choice i is what a request with seed + i (mod 2**64) gives. The
        step engine takes n = 1 only: see `choices`.
    max_tokens: most tokens to generate, at least 1; 0 is allowed with prompt_logprobs, and only scores the prompt,
        and with pooling.
    min_tokens: tokens that come whatever happens: none of them is an end token or a stop token, and no stop string
        ends in their text. A limit of length still ends the request.
    temperature: 0 is greedy; else logits are divided by it.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the likeliest tokens whose probabilities add up to p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    repetition_penalty: > 1 weakens tokens of the prompt and the output (CTRL, arXiv:1909.05858).
    presence_penalty, frequency_penalty: OpenAI's, over output tokens, in [-2, 2].
    logit_bias: token id -> number added to its logit, each in [-100, 100].
    seed: the choice at a position depends on the seed and the position only; None draws one per request.
    stop: strings that end the output; cut off unless include_stop_str_in_output.
    stop_token_ids: token ids that end the output, besides the model's own end tokens.
    ignore_eos: go on past the model's own end tokens.
    json_schema: the output is JSON that this schema (text, or a mapping) describes, with at most one space between its
        tokens. regex: the output as a whole matches this regular expression. One of the two, with the extra
        `structured`; an end token ends such an output, max_tokens may cut it short.
    logprobs: report the chosen token's log-probability and the k likeliest ones' (raw, before
        temperature, penalties and bias), 0 to 20; None reports none, 0 the chosen token's alone.
    prompt_logprobs: the same for every prompt token but the first, which nothing precedes. Such a request computes its
        whole prompt itself, whatever is cached; what it computes can be found by others.
    pooling: an embedding of the prompt, instead of output; see `embedding_params`.
    cache_priority: 1 to 9 pins the prompt's cached blocks: they are evicted after all of a lower priority (0: no pin).
        A pin changes no output. How much of the pool pins may hold is limited; what exceeds that is not pinned.
    pin_ttl_s: seconds from the end of the request until the pin ends, at most a day; None is 300. Without a
        cache_priority, that is 1.

    Raises InvalidParameterError.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    pooling: PoolingParams | None = None
    cache_priority: int = 0
    pin_ttl_s: float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen: normalised values go in here, once
        _integer("n", self.n, 1, "an integer >= 1")
        hint = "an integer >= 1 (or 0 with prompt_logprobs, which scores the prompt and generates nothing)"
        may_be_zero = self.prompt_logprobs is not None or self.pooling is not None
        _integer("max_tokens", self.max_tokens, 0 if may_be_zero else 1, hint)
        self._check_pooling()
        if self.n > 1 and self.max_tokens == 0:
            raise InvalidParameterError(f"n must be 1 where nothing is generated (max_tokens=0), got {self.n}")
        _integer("min_tokens", self.min_tokens, 0, "an integer >= 0")
        if self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} with max_tokens {self.max_tokens}"
            )
        put(self, "temperature", _number("temperature", self.temperature, 0.0, 100.0, "in [0, 100]; 0 is greedy"))
        top_k = 0 if self.top_k == -1 else self.top_k
        put(self, "top_k", _integer("top_k", top_k, 0, "an integer >= 0 (0 or -1: all)"))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]"))
        if self.top_p == 0.0:
            raise InvalidParameterError("top_p must be in (0, 1], got 0; for greedy choice set temperature=0")
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]"))
        penalty = _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "in [0.01, 100]; 1 is off")
        put(self, "repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, _number(name, getattr(self, name), -2.0, 2.0, "in [-2, 2]"))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameterError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        bias = {
            _integer("logit_bias", key, 0, "a map from token ids (integers >= 0)"): _number(
                "logit_bias", value, -100.0, 100.0, "in [-100, 100]"
            )
            for key, value in self.logit_bias.items()
        }
        put(self, "logit_bias", bias)
        if self.seed is not None:
            _integer("seed", self.seed, 0, "an integer in [0, 2**64) or None")
            if self.seed >= 2**64:
                raise InvalidParameterError(f"seed must be an integer in [0, 2**64) or None, got {self.seed}")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise InvalidParameterError(f"stop must be a string or a list of strings, got {self.stop!r}")
        stop = tuple(stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise InvalidParameterError(f"stop must hold non-empty strings, got {self.stop!r}")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError(f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        put(self, "stop", stop)
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        put(self, "stop_token_ids", _integers("stop_token_ids", ends))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and _integer(name, value, 0, "an integer >= 0 or None") > MAX_LOGPROBS:
                raise InvalidParameterError(f"{name} must be at most {MAX_LOGPROBS}, got {value}")
        self._check_structured()
        hint = f"an integer in [0, {MAX_CACHE_PRIORITY}]; 0 is no pin"
        if _integer("cache_priority", self.cache_priority, 0, hint) > MAX_CACHE_PRIORITY:
            raise InvalidParameterError(f"cache_priority must be {hint}, got {self.cache_priority}")
        if self.pin_ttl_s is not None:
            hint = f"in (0, {MAX_PIN_TTL_S:g}] seconds, or None"
            put(self, "pin_ttl_s", _number("pin_ttl_s", self.pin_ttl_s, 0.0, MAX_PIN_TTL_S, hint))
            if self.pin_ttl_s == 0.0:
                raise InvalidParameterError(f"pin_ttl_s must be {hint}, got 0; for no pin leave it out")

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if not isinstance(self.pooling, PoolingParams):
            raise InvalidParameterError(f"pooling must be PoolingParams or None, got {self.pooling!r}")
        if self.max_tokens > 0 or self.prompt_logprobs is not None:
            raise InvalidParameterError(
                "pooling gives an embedding of the prompt and nothing else: set max_tokens=0 "
                "and leave prompt_logprobs out"
            )

    def _check_structured(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        wanted = [name for name in ("json_schema", "regex") if getattr(self, name) is not None]
        for name in wanted:
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise InvalidParameterError(f"{name} must be a non-empty string or None, got {text!r}")
            if len(text) > MAX_GRAMMAR_CHARS:
                raise InvalidParameterError(
                    f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed"
                )
        if isinstance(self.json_schema, str):
            _check_schema(self.json_schema)
        if len(wanted) == 2:
            raise InvalidParameterError("regex and json_schema both shape the output: give one of them")
        if wanted and (self.min_tokens or self.ignore_eos):
            other = "min_tokens" if self.min_tokens else "ignore_eos"
            raise InvalidParameterError(
                f"{other} goes against {wanted[0]}, which says where the output ends: leave one of them out"
            )

    def choices(self) -> list[SamplingParams]:
        """Parameters of the n requests that give the n sequences. Only the first one scores the prompt."""
        if self.n == 1:
            return [self]
        return [
            replace(
                self,
                n=1,
                seed=None if self.seed is None else (self.seed + index) % 2**64,
                prompt_logprobs=None if index else self.prompt_logprobs,
            )
            for index in range(self.n)
        ]

    @property
    def is_structured(self) -> bool:
        """Whether a grammar says what the output may be."""
        return self.json_schema is not None or self.regex is not None

    @property
    def pin(self) -> tuple[int, float] | None:
        """(priority, seconds) of the pin on the prompt's blocks; None without one."""
        if not self.cache_priority and self.pin_ttl_s is None:
            return None
        return self.cache_priority or 1, DEFAULT_PIN_TTL_S if self.pin_ttl_s is None else self.pin_ttl_s

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token looks at the tokens before it (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def embedding_params(pooling: PoolingParams) -> SamplingParams:
    """Parameters of a request that gives an embedding. It draws no seed, so it changes no other request's output."""
    return SamplingParams(max_tokens=0, seed=0, pooling=pooling)
