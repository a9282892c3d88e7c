"""Text to tokens without doing the same piece of text twice: a bounded memo of pieces between special tokens.

A conversation comes again with every turn, one message longer. Cut at its special tokens, all of its pieces but the
last ones were tokenised before. Pieces are found by their whole text, never by a hash alone, and only by their domain:
what one tenant's text costs says nothing about another's. Knows tokenizers and texts; must not know requests or HTTP.
"""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from collections import OrderedDict
from typing import Any

from anaphora.engine.pieces import NotPiecewiseError, Pieces

_logger = logging.getLogger(__name__)

MAX_PIECES = 4096
"""A text of more pieces is tokenised as a whole: that costs less than so many calls for small pieces that are new."""

_ENTRY_BYTES = 400  # a key, an array and their places in the table


class TokenMemo:
    """The tokens of pieces of text by domain and text; the least recently used go first. Any thread may call it.

    max_bytes: of texts, tokens and bookkeeping together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, domain: str, piece: str) -> array[int] | None:
        """The tokens of a piece that this domain has put in; None if there are none, or no more."""
        key = domain, piece
        with self._lock:
            token_ids = self._entries.get(key)
            if token_ids is not None:
                self._entries.move_to_end(key)
            return token_ids

    def put(self, domain: str, piece: str, token_ids: list[int]) -> None:
        entry = array("I", token_ids)
        size = _size(domain, piece, entry)
        if size > self.max_bytes:
            return
        with self._lock:
            if (domain, piece) in self._entries:  # another thread was faster
                return
            self._entries[domain, piece] = entry
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                (old_domain, old_piece), old = self._entries.popitem(last=False)
                self.num_bytes -= _size(old_domain, old_piece, old)


def _size(domain: str, piece: str, token_ids: array[int]) -> int:
    return sys.getsizeof(domain) + sys.getsizeof(piece) + token_ids.itemsize * len(token_ids) + _ENTRY_BYTES


class MemoEncoder:
    """`tokenizer.encode` with a memo: the same tokens, always. pieces: of this tokenizer."""

    def __init__(self, tokenizer: Any, pieces: Pieces, memo: TokenMemo) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._memo = memo

    def encode(self, text: str, *, add_special_tokens: bool, domain: str) -> list[int]:
        """domain: who may learn from the time of this call what was tokenised before."""
        parts = self._pieces.split(text)
        if len(parts) > MAX_PIECES:
            whole: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return whole
        before, after = self._pieces.around(add_special_tokens=add_special_tokens)
        token_ids = list(before)
        for part in parts:
            if isinstance(part, int):
                token_ids.append(part)
                continue
            known = self._memo.get(domain, part)
            if known is None:
                new = self._tokenizer.encode(part, add_special_tokens=False)
                self._memo.put(domain, part, new)
                token_ids += new
            else:
                token_ids.extend(known)
        token_ids += after
        return token_ids


def memo_encoder(tokenizer: Any, max_bytes: int) -> MemoEncoder | None:
    """None, with a line in the log, for a tokenizer whose pieces do not stand alone; None for no bytes."""
    if tokenizer is None or not max_bytes:
        return None
    try:
        return MemoEncoder(tokenizer, Pieces(tokenizer), TokenMemo(max_bytes))
    except NotPiecewiseError as reason:
        _logger.info("text is tokenised anew every time, as the tokenizer does not work piece by piece: %s", reason)
        return None
