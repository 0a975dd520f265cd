"""Files of a model on the Hugging Face hub, in huggingface_hub's own cache.

In goes a repository's name, out comes its snapshot folder, whose name is the commit. HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE are obeyed by huggingface_hub. The invariant: only config, tokenizer and
safetensors files at the top of a repository are ever fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_bucket.checkpoint import PICKLES, WEIGHT_FILES, has_weight_files
from mlx_bucket.errors import SourceError
from mlx_bucket.progress import Progress, following

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
BELOW_THE_TOP = "*/*"


def fetch_small_files(repository: str, revision: str | None) -> Path:
    """The snapshot folder with the repository's config and tokenizer files.

    Raises:
        SourceError: there is no such model or revision, it is gated, or the hub is out of reach.
    """
    with _explained(repository, revision):
        return _snapshot(repository, revision, list(SMALL_FILES))


def fetch_weights(repository: str, snapshot: Path, *, progress: bool = False) -> None:
    """Add the safetensors files to a snapshot folder, if they are not there yet.

    Raises:
        SourceError: the repository has none, or the hub is out of reach.
    """
    if has_weight_files(snapshot):
        return
    commit, blobs = snapshot.name, snapshot.parent.parent / "blobs"
    with _explained(repository, commit):
        files = _weight_files(repository, commit)
        total = sum(file.size or 0 for file in files)
        title = f"Fetching {repository}"
        with (
            Progress(title, total, unit="bytes", visible=progress) as bar,
            following(bar, blobs),
        ):
            _snapshot(repository, commit, [file.rfilename for file in files])


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=[BELOW_THE_TOP],
            tqdm_class=_silent_bar(),
        )
    )


def _silent_bar() -> type[Any]:
    """A bar for huggingface_hub that shows nothing: ours is shown instead."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


def _weight_files(repository: str, commit: str) -> list[RepoSibling]:
    from huggingface_hub import HfApi

    files = HfApi().model_info(repository, revision=commit, files_metadata=True).siblings or []
    top = [file for file in files if "/" not in file.rfilename]
    wanted = [file for file in top if fnmatchcase(file.rfilename, WEIGHT_FILES)]
    if not wanted:
        names = [file.rfilename for file in top]
        pickles = [name for name in names if any(fnmatchcase(name, kind) for kind in PICKLES)]
        what = (
            f"only as a pickle ({pickles[0]}), which could run code and is never fetched"
            if pickles
            else f"in no file named {WEIGHT_FILES}"
        )
        raise SourceError(
            f"The hub model {repository} holds its weights {what}; choose a repository that has "
            "safetensors."
        )
    return wanted


@contextlib.contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence that says what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        yield
    except SourceError:
        raise
    except errors.GatedRepoError as error:
        raise SourceError(
            f"The hub model {repository} is gated: accept its terms on its page, and set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(
            f"The hub model {repository} has no revision {revision}; see its page for branches, "
            "tags and commits."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise SourceError(
            f"There is no preset, folder, .gguf file or public hub model named {repository}; check "
            "the name, and set HF_TOKEN if the model is private."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise SourceError(
            f"The hub model {repository}{at} is not on this machine and the hub cannot be reached; "
            "check the connection and HF_HUB_OFFLINE, or use a packed model such as "
            "--model qwen2.5-coder-0.5b."
        ) from error
    except Exception as error:  # the errors of the HTTP library and of the file system
        raise SourceError(
            f"The hub model {repository}{at} could not be fetched "
            f"({' '.join(str(error).split())}); try again."
        ) from error
