"""The options that several commands share, each said once.

A command takes a whole group as one keyword parameter, and `flatten_options` shows it to typer as one option a field:

    @flatten_options
    def generate(prompts: ..., *, engine: EngineOptions, sampling: SamplingOptions) -> None: ...

Knows typer and the names and defaults in `anaphora.config` and `anaphora.sampling_params`, which also check the values.
Must not import torch or build an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from anaphora.config import (
    DTYPES,
    EVICTION_POLICIES,
    HASH_ALGORITHMS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from anaphora.errors import InvalidParameterError
from anaphora.runtime.sources.names import check_names
from anaphora.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anaphora.api.llm import LLM

DEFAULT_MODEL = "smollm2-135m"

_ENGINE: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
_SAMPLING: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def _engine(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Engine")


def _sampling(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Sampling")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Every field of EngineConfig, under the same name."""

    model: Annotated[
        str, _engine("--model", "-m", help="Built-in name, folder, GGUF file or hub id. See `anaphora models`.")
    ] = DEFAULT_MODEL
    tokenizer: Annotated[str | None, _engine(help="Folder or hub id, if not the model's own.")] = _ENGINE["tokenizer"]
    block_size: Annotated[int, _engine(help="Token positions in one block.")] = _ENGINE["block_size"]
    num_blocks: Annotated[
        int | None, _engine(help="Usable blocks in the pool; without it --kv-cache-bytes sizes the pool.")
    ] = _ENGINE["num_blocks"]
    kv_cache_bytes: Annotated[
        int | None, _engine(help="Memory for K/V; without it a quarter of what is available now.")
    ] = _ENGINE["kv_cache_bytes"]
    num_state_slots: Annotated[
        int | None, _engine(help="Most checkpoints of recurrent state; without it a quarter of what the K/V take.")
    ] = _ENGINE["num_state_slots"]
    state_checkpoint_interval: Annotated[
        int, _engine(help="Tokens of a prompt after which a recurrent state is kept.")
    ] = _ENGINE["state_checkpoint_interval"]
    max_num_batched_tokens: Annotated[int, _engine(help="Most tokens scheduled in one step.")] = _ENGINE[
        "max_num_batched_tokens"
    ]
    max_num_seqs: Annotated[int, _engine(help="Most requests running at once.")] = _ENGINE["max_num_seqs"]
    long_prefill_token_threshold: Annotated[
        int | None, _engine(help="Most tokens of one request in a step; without it the whole step.")
    ] = _ENGINE["long_prefill_token_threshold"]
    max_model_len: Annotated[
        int | None, _engine(help="Most tokens of one request, prompt and output; without it the model's own limit.")
    ] = _ENGINE["max_model_len"]
    enable_prefix_caching: Annotated[
        bool, _engine("--prefix-caching/--no-prefix-caching", help="Reuse beginnings, or compute every prompt in full.")
    ] = _ENGINE["enable_prefix_caching"]
    hash_algorithm: Annotated[str, _engine(help=f"What names the blocks: {', '.join(HASH_ALGORITHMS)}.")] = _ENGINE[
        "hash_algorithm"
    ]
    eviction_policy: Annotated[str, _engine(help=f"One of {', '.join(EVICTION_POLICIES)}.")] = _ENGINE[
        "eviction_policy"
    ]
    max_pinned_share: Annotated[
        float, _engine(help="Most of the pool that requests may pin (cache_priority), 0 to 1.")
    ] = _ENGINE["max_pinned_share"]
    max_pinned_share_per_tenant: Annotated[float, _engine(help="The same, of one tenant.")] = _ENGINE[
        "max_pinned_share_per_tenant"
    ]
    scheduling_policy: Annotated[str, _engine(help=f"One of {', '.join(SCHEDULING_POLICIES)}.")] = _ENGINE[
        "scheduling_policy"
    ]
    dtype: Annotated[str, _engine(help=f"Of weights and K/V: {', '.join(DTYPES)}.")] = _ENGINE["dtype"]
    quantization: Annotated[
        str | None,
        _engine(help=f"Smaller weights: {', '.join(QUANTIZATIONS)}; without it as they are. See docs/quantization.md."),
    ] = _ENGINE["quantization"]
    device: Annotated[str | None, _engine(help="Torch device; without it the CPU.")] = _ENGINE["device"]
    max_loras: Annotated[int, _engine(help="Most LoRA adapters in memory; others are read again on use.")] = _ENGINE[
        "max_loras"
    ]
    max_lora_rank: Annotated[int, _engine(help="The largest rank of a LoRA adapter.")] = _ENGINE["max_lora_rank"]
    max_images: Annotated[int, _engine(help="Most images in one prompt.")] = _ENGINE["max_images"]
    max_image_bytes: Annotated[int, _engine(help="Largest image file.")] = _ENGINE["max_image_bytes"]
    max_image_pixels: Annotated[int, _engine(help="Most pixels of one image.")] = _ENGINE["max_image_pixels"]
    feature_cache_bytes: Annotated[int, _engine(help="Memory for encoded images.")] = _ENGINE["feature_cache_bytes"]
    fast_forward: Annotated[
        bool,
        _engine("--fast-forward/--no-fast-forward", help="Run known decoders in our own loop, or in transformers'."),
    ] = _ENGINE["fast_forward"]
    reproducible: Annotated[
        bool, _engine("--reproducible", help="The same bits whatever is cached or batched; see docs/reproducible.md.")
    ] = _ENGINE["reproducible"]
    num_threads: Annotated[int | None, _engine(help="Torch's threads; without it torch chooses.")] = _ENGINE[
        "num_threads"
    ]
    warm_up: Annotated[
        bool | None,
        _engine("--warm-up/--no-warm-up", help="Run a few steps before the first request; `serve` does by default."),
    ] = _ENGINE["warm_up"]
    seed: Annotated[int, _engine(help="Where requests draw their seeds from.")] = _ENGINE["seed"]
    cache_dir: Annotated[Path | None, _engine(help="Where fetched models are kept.")] = _ENGINE["cache_dir"]
    record: Annotated[
        Path | None, _engine(help="Record times, lengths and keyed block hashes here, for `anaphora simulate`.")
    ] = _ENGINE["record"]

    def check_names(self, *, needs_chat_template: bool = False) -> None:
        """Refuse wrong names and options before torch is imported. Raises ConfigError, ModelError, RequestError."""
        EngineConfig(**dataclasses.asdict(self))
        check_names(self.model, self.tokenizer, needs_chat_template=needs_chat_template)

    def load(self) -> LLM:
        """The model, and on stderr what takes long on the way. Raises ConfigError, ModelError."""
        from anaphora.api.build import build_engine
        from anaphora.api.llm import LLM

        return LLM.from_engine(build_engine(EngineConfig(**dataclasses.asdict(self)), progress=True))


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """SamplingParams for the command line: greedy unless asked otherwise, so that a command gives one answer.

    A request's own seed is left out: `--seed` of the engine decides for all of them.
    """

    max_tokens: Annotated[int, _sampling("--max-tokens", "-n", help="Most tokens to generate.")] = 128
    temperature: Annotated[float, _sampling("--temperature", "-t", help="0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling(help="Keep the k likeliest tokens; 0 keeps all.")] = _SAMPLING["top_k"]
    top_p: Annotated[float, _sampling(help="Keep the likeliest tokens that add up to p.")] = _SAMPLING["top_p"]
    min_p: Annotated[float, _sampling(help="Drop tokens below p times the likeliest.")] = _SAMPLING["min_p"]
    repetition_penalty: Annotated[float, _sampling(help="Above 1 weakens tokens seen before.")] = _SAMPLING[
        "repetition_penalty"
    ]
    presence_penalty: Annotated[float, _sampling(help="In [-2, 2], on output tokens.")] = _SAMPLING["presence_penalty"]
    frequency_penalty: Annotated[float, _sampling(help="In [-2, 2], on output tokens.")] = _SAMPLING[
        "frequency_penalty"
    ]
    logit_bias: Annotated[
        list[str] | None, _sampling(help="TOKEN_ID=NUMBER, added to that token's logit. Repeatable.")
    ] = None
    stop: Annotated[list[str] | None, _sampling(help="A string that ends the output. Repeatable.")] = None
    stop_token_id: Annotated[list[int] | None, _sampling(help="A token id that ends the output. Repeatable.")] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on past the model's own end tokens.")] = False
    logprobs: Annotated[
        int | None, _sampling(help="Report log-probabilities of the chosen and the k likeliest tokens (with --json).")
    ] = _SAMPLING["logprobs"]
    include_stop: Annotated[bool, _sampling("--include-stop", help="Keep the stop string in the output.")] = False
    special_tokens: Annotated[bool, _sampling("--special-tokens", help="Show special tokens in the text.")] = False

    def params(self) -> SamplingParams:
        """Raises InvalidParameterError."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(_bias(entry) for entry in self.logit_bias or ()),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            include_stop_str_in_output=self.include_stop,
            skip_special_tokens=not self.special_tokens,
        )


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, number = entry.partition("=")
    try:
        return int(token_id), float(number)
    except ValueError:
        raise InvalidParameterError(f"logit bias must look like TOKEN_ID=NUMBER, got {entry!r}") from None


JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]
CacheSalt = Annotated[
    str | None, typer.Option("--cache-salt", help="Share cached beginnings only with requests of the same salt.")
]


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show each parameter that is an option group (a dataclass) as one option a field.

    Typer reads signatures; this gives it one that lists the fields, and hands the command the group it asked for.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            parameters.append(
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field_hints[field.name]
                )
            )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
