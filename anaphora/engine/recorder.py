"""Records what a cache sees of each request, so that `anaphora simulate` can replay it: times, lengths, block hashes.

    step thread   record(request) --queue, bounded-->   writer thread: key the hashes, one write of whole lines

No text and no token ids. Every block hash is keyed with 32 random bytes that this recording alone has and no disk ever
sees: ids of two recordings cannot be joined, and nobody can try out which prompt has an id. Tenants' salts are in the
block hashes, so their ids differ too. The format is in docs/simulate.md.

Knows finished requests and a file; must not know the engine or who replays.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import weakref
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from anaphora.core.hashing import BlockChain, encode_tokens, sha256
from anaphora.core.request import Request
from anaphora.errors import ConfigError

_logger = logging.getLogger(__name__)

FORMAT = "anaphora-trace"
VERSION = 1
DEFAULT_MAX_WAITING = 1024
_LAST_WORDS_S = 30.0  # how long the end of the process waits for a slow disk


def check_recordable(path: Path) -> None:
    """Whether a recording can begin there: better told before a model is loaded. Raises ConfigError."""
    if path.exists():
        raise ConfigError(f"record: {path} exists already; choose another file, or move it away")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"record: the folder of {path} does not exist or cannot be written to")


class TraceRecorder:
    """One recording into a new file, from now until `close` or the end of the process.

    block_size: of the engine. start_s: now, by the engine's clock. max_waiting: most requests that wait to be
    written; beyond that they are left out and counted, so that a slow disk costs neither memory nor time of a step.
    Raises ConfigError.
    """

    def __init__(self, path: Path, *, block_size: int, start_s: float, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        self._writer = _Writer(path, _Lines(block_size, start_s), max_waiting)
        self._thread = threading.Thread(target=self._writer.run, name="anaphora-record", daemon=True)
        self._thread.start()
        # Also at the end of the process, which ends daemon threads in the middle of whatever they do.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._thread)

    @property
    def num_left_out(self) -> int:
        """Requests that came faster than they could be written, or after the disk was full."""
        return self._writer.num_left_out

    def record(self, request: Request, arrival_s: float, root: bytes) -> None:
        """Take a request that has ended. One that never got blocks is none that a cache has seen. Costs no more than
        putting it into a queue.

        root: of the model that it was computed by.
        """
        if request.was_admitted:
            self._writer.put(_Ended(request, arrival_s, root))

    def flush(self) -> None:
        """Return when every request taken so far is in the file, or the recording has stopped."""
        self._writer.wait_until_written()

    def close(self) -> None:
        """Write what waits and end. Twice is harmless."""
        self._finalizer()


class _Ended(NamedTuple):
    request: Request
    arrival_s: float
    root: bytes


def _close(writer: _Writer, thread: threading.Thread) -> None:
    writer.end()
    thread.join(_LAST_WORDS_S)


class _Lines:
    """Turns requests into lines."""

    def __init__(self, block_size: int, start_s: float) -> None:
        self.block_size = block_size
        self._start_s = start_s
        self._key = secrets.token_bytes(32)

    def header(self) -> bytes:
        return _line({"format": FORMAT, "version": VERSION, "block_size": self.block_size})

    def of(self, request: Request, arrival_s: float, root: bytes) -> bytes:
        input_length, output_length = request.num_prompt_tokens, request.num_output_tokens
        num_full, num_tail = divmod(input_length, self.block_size)
        num_known = (input_length + max(output_length - 1, 0)) // self.block_size
        chain = request.chain
        if chain is None:  # prefix caching is off: what it would be worth if nothing were forgotten
            chain = BlockChain(root, self.block_size, sha256, request.extra_keys)
            chain.extend(request.tokens)
        ids = [self._id(name) for name in chain.hashes[:num_known]]
        prompt_ids = ids[:num_full]
        if num_tail:
            parent = chain.hashes[num_full - 1] if num_full else chain.root
            tail = encode_tokens(request.tokens[input_length - num_tail : input_length])
            prompt_ids.append(self._id(parent + chain.extra_keys.get(num_full, b"") + tail, b"tail"))
        return _line(
            {
                "timestamp": round(max(0.0, arrival_s - self._start_s) * 1000, 3),
                "input_length": input_length,
                "output_length": output_length,
                "hash_ids": prompt_ids,
                "output_hash_ids": ids[num_full:],
                "cached_tokens": request.num_cached_tokens,
                "arrival": request.arrival,
            }
        )

    def _id(self, name: bytes, person: bytes = b"block") -> int:
        """63 bits: of ten million blocks, two have one id with a chance of 5 in a million."""
        return int.from_bytes(blake2b(name, digest_size=8, key=self._key, person=person).digest()) >> 1


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


class _Writer:
    """Owns the file and the queue. `run` is the thread; everything else may be called from any other one."""

    def __init__(self, path: Path, lines: _Lines, max_waiting: int) -> None:
        self.num_left_out = 0
        self._path = path
        self._lines = lines
        self._max_waiting = max_waiting
        self._waiting: deque[_Ended] = deque()
        self._is_writing = False
        self._has_ended = False
        self._changed = threading.Condition()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"record: {path} cannot be created: {error.strerror or error}") from error
        self._size = 0
        try:
            self._write(lines.header())
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"record: {path} cannot be written to: {error.strerror or error}") from error

    def put(self, ended: _Ended) -> None:
        with self._changed:
            if self._has_ended or len(self._waiting) >= self._max_waiting:
                self.num_left_out += 1
                if self.num_left_out == 1 and not self._has_ended:
                    _logger.warning("%s: requests end faster than they can be recorded; some are left out", self._path)
                return
            self._waiting.append(ended)
            self._changed.notify_all()

    def wait_until_written(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing)

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def run(self) -> None:
        try:
            while taken := self._take():
                self._write(b"".join(self._lines.of(*ended) for ended in taken))
        except OSError as error:
            self._truncate()
            _logger.warning(
                "recording to %s stops, %s: what is there can be replayed", self._path, error.strerror or error
            )
        finally:
            with self._changed:
                self._has_ended = True
                self.num_left_out += len(self._waiting)
                self._waiting.clear()
                self._is_writing = False
                self._changed.notify_all()
            os.close(self._file)

    def _take(self) -> list[_Ended]:
        """All that waits; waits for something; nothing at the end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            taken = list(self._waiting)
            self._waiting.clear()
            self._is_writing = bool(taken)
            return taken

    def _write(self, data: bytes) -> None:
        """Whole lines, in one system call where the disk has room. Raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)

    def _truncate(self) -> None:
        """Cut the line off that a full disk has cut."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError as error:
            _logger.warning("%s ends in half a line: %s", self._path, error)
