"""Gets a model's files from the Hugging Face hub, or from what an earlier visit left in its cache."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from anaphora.errors import DiskSpaceError, FetchError, UnknownModelError
from anaphora.runtime.sources.disk import is_disk_full
from anaphora.runtime.sources.progress import Progress

_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
_OLD_WEIGHTS = ("pytorch_model*.bin",)


def fetch_snapshot(repo_id: str, progress: Progress, what: str = "model") -> Path:
    """The folder of this model in the hub's own cache. what: what to call it in errors.

    Raises UnknownModelError, also where the hub cannot be asked whether it has the model; FetchError, DiskSpaceError.
    """
    hide = not progress.bars and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        # on a terminal the hub draws bars of its own
        with nullcontext() if progress.bars else progress.stage(f"Fetching {repo_id} from the hub"):
            folder = Path(snapshot_download(repo_id, allow_patterns=list(_FILES)))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(repo_id, allow_patterns=list(_OLD_WEIGHTS))
    except GatedRepoError as error:
        raise FetchError(f"{repo_id} is gated: accept its terms on huggingface.co and run `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModelError(
            f"the hub has no {what} {repo_id} that you may read, and there is no such folder here: check the spelling, "
            "or run `hf auth login` if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UnknownModelError(
            f"the {what} {repo_id} is neither a folder here nor in the hub's cache, and the hub cannot be reached: "
            f"check the network (HF_ENDPOINT, HF_HUB_OFFLINE, proxies), or give a folder ({error.__cause__ or error})"
        ) from error
    except Exception as error:  # the errors of its HTTP client differ from release to release
        if is_disk_full(error):
            raise DiskSpaceError(
                f"the disk became full while fetching {repo_id}: free some space, or set HF_HOME"
            ) from error
        raise FetchError(f"{repo_id} cannot be fetched from the hub: {error}") from error
    finally:
        if hide:
            enable_progress_bars()
    return folder
