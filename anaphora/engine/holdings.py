"""What requests hold from when they come to when they end: an adapter, and what stands in a prompt instead of tokens.

Knows the adapters' registry and the part of an executor that holds features; must not know steps, order or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anaphora.core.request import Request
from anaphora.engine.adapters import Adapter, AdapterInfo, AdapterRegistry
from anaphora.engine.multimodal import FeatureHolder
from anaphora.engine.protocols import Executor
from anaphora.errors import InvalidParameterError, UnknownAdapterError

_DIGEST = re.compile("[0-9a-f]{64}")


class Holdings:
    """adapters: None refuses LoRA adapters. An executor that is no FeatureHolder refuses all but tokens."""

    def __init__(self, adapters: AdapterRegistry | None, executor: Executor) -> None:
        self._adapters = adapters
        self._executor = executor

    @property
    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """What is loaded, by name. A snapshot that any thread may take."""
        return () if self._adapters is None else self._adapters.infos

    @property
    def adapters(self) -> AdapterRegistry:
        """Raises InvalidParameterError."""
        if self._adapters is None:
            raise InvalidParameterError("this engine was made without LoRA adapters: build it with build_engine or LLM")
        return self._adapters

    def digest_of(self, adapter: str) -> str:
        """What a loaded name stands for; a digest as it is. Raises UnknownAdapterError."""
        named = {info.name: info.digest for info in self.adapter_infos}
        if isinstance(adapter, str) and (adapter in named or _DIGEST.fullmatch(adapter)):
            return named.get(adapter, adapter)
        raise UnknownAdapterError(
            f"no adapter named {adapter!r} is loaded: name one that is, or give its digest in hex"
        )

    @contextmanager
    def acquired(
        self,
        adapter: str | None,
        sources: Mapping[str, Any],
        read_again: Callable[[AdapterInfo], Adapter] | None = None,
    ) -> Iterator[str | None]:
        """One more request holds the adapter of this name and these features; gives the adapter's digest.

        If the block succeeds, `release` ends it, else nothing is kept. See AdapterRegistry.acquired.
        """
        if adapter is None:
            with self._acquired_features(sources):
                yield None
        else:
            with self.adapters.acquired(adapter, read_again) as digest, self._acquired_features(sources):
                yield digest

    def release(self, request: Request) -> None:
        """A request has ended."""
        if request.adapter is not None:
            self.adapters.release(request.adapter)
        if request.features:
            self._features.release_features(dict.fromkeys(span.digest for span in request.features))

    @property
    def _features(self) -> FeatureHolder:
        if not isinstance(self._executor, FeatureHolder):
            raise InvalidParameterError("this engine's executor takes tokens only: build the engine over a model")
        return self._executor

    @contextmanager
    def _acquired_features(self, sources: Mapping[str, Any]) -> Iterator[None]:
        if not sources:
            yield
            return
        self._features.add_features(sources)
        try:
            yield
        except BaseException:
            self._features.release_features(sources)
            raise
