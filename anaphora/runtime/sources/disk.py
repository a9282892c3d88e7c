"""The cache folder: where it is, whether there is room, and how a folder comes into being all at once or not at all.

Knows folders and locks; knows nothing of models.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from anaphora.errors import ConfigError, DiskSpaceError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (  # the last three: links into nothing or in a circle, and names that no disk takes
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip
_REMEDY = "free some space, or set ANAPHORA_CACHE (or cache_dir) to a folder on another disk"


def default_cache_dir() -> Path:
    """$ANAPHORA_CACHE, or $XDG_CACHE_HOME/anaphora, or ~/.cache/anaphora."""
    if chosen := os.environ.get("ANAPHORA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anaphora"


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise DiskSpaceError unless the disk of this existing folder has that much room."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise DiskSpaceError(
            f"{folder} has {free / 1e6:,.0f} MB free, {needed_bytes / 1e6:,.0f} MB are needed: {_REMEDY}"
        )


def is_disk_full(error: BaseException) -> bool:
    """Whether this error says that a disk or quota is full; safetensors says so by its text alone."""
    return getattr(error, "errno", None) in _FULL or f"os error {errno.ENOSPC}" in str(error)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk into DiskSpaceError and a folder that cannot be written into ConfigError."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise DiskSpaceError(f"the disk became full while writing to {folder}: {_REMEDY}") from error
        if isinstance(error, OSError) and error.errno in _NO_FOLDER:
            raise ConfigError(
                f"the cache folder {folder} cannot be written ({error.strerror}): set ANAPHORA_CACHE or cache_dir"
            ) from error
        raise


def build_once(target: Path, is_complete: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """Make the folder `target` unless it is there and complete. Returns it.

    build fills a new, empty folder beside the target, which then takes the target's name in one move: nobody ever
    sees half of it. Of several processes one builds; the others wait for it. What a killed process left behind is
    removed by the next one that builds.
    """
    if is_complete(target):
        return target
    parent = target.parent
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{target.name}.lock"):
            if is_complete(target):
                return target
            for leftover in parent.glob(f".{glob.escape(target.name)}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=parent))
            try:
                build(temporary)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target
