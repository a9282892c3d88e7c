"""Keeps `transformers` silent while a model loads, and puts everything back after.

What it would have said that matters (missing weights) is asked for and raised elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from anaphora.runtime.sources.progress import Advance


class _SilentBar:
    """Stands in for a tqdm bar: passes items through and reports their count as a share of 1,000."""

    def __init__(self, iterable: Iterable[Any] | None = None, *args: Any, total: int | None = None, **kwargs: Any):
        self._iterable: Iterable[Any] = () if iterable is None else iterable
        self._advance: Advance | None = kwargs.pop("advance", None)
        self._total = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def __enter__(self) -> _SilentBar:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._advance is not None and self._total:
            self._advance(1000 * self._done // self._total)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None  # set_description, close and the like


@contextmanager
def quiet_transformers(advance: Advance | None = None) -> Iterator[None]:
    """Within it, `transformers` logs errors only and draws no bars.

    advance: told the progress of each of its bars instead, as a share of 1,000.
    """

    def bar(*args: Any, **kwargs: Any) -> _SilentBar:
        return _SilentBar(*args, **kwargs, advance=advance)

    logger = logging.getLogger("transformers")
    level = logger.level
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)
        previous = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: bar(*args, **kwargs))
        stack.callback(transformers_logging.set_tqdm_hook, previous)
        # the reader of GGUF weights takes tqdm itself, past the hook
        reader: Any = modeling_gguf_pytorch_utils
        stack.callback(setattr, reader, "tqdm", reader.tqdm)
        reader.tqdm = bar
        yield
