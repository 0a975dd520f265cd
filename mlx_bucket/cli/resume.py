"""``--resume``: the journal of a command, and the job that it is the journal of.

In go the options of a command and the model that they led to; out comes an open journal beside the
output. The invariant: whatever can change an answer, or where it stands, is a part of the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from mlx_bucket.errors import UsageError
from mlx_bucket.jobs.inputs import reading
from mlx_bucket.jobs.journal import Journal, open_journal
from mlx_bucket.jobs.outputs import OnKept
from mlx_bucket.weights import LoadedModel

ENDING = ".journal"
NOT_OF_THE_JOB = (
    *("output", "overwrite", "resume", "as_json", "show_prompt"),
    *("errors_file", "max_errors", "on_error"),
)


def check_resume(given: Mapping[str, Any]) -> None:
    """See that a run can be gone on with.

    Raises:
        UsageError: its rows can be read only once, or would not get the same answers again.
    """
    if not given["resume"]:
        return
    if given["output"] == "-":
        raise UsageError("--resume keeps its journal beside the output, so give -o FILE.")
    if given["file"] == "-":
        raise UsageError("--resume reads the rows again, so name a file instead of -.")
    if given.get("temperature"):
        raise UsageError(
            "Answers that are drawn depend on the rows beside them, so a resumed run would draw "
            "others; use --temperature 0 with --resume."
        )
    if given.get("certify"):
        raise UsageError(
            "Which rows --certify runs again depends on all of a run; use --dtype float32 with "
            "--resume."
        )


@contextmanager
def resumed(
    ctx: click.Context, given: Mapping[str, Any], loaded: LoadedModel, on_kept: OnKept
) -> Iterator[Journal | None]:
    """The journal beside the output; None without ``--resume``.

    Raises:
        OutputError, UsageError: see ``jobs.journal.open_journal``.
    """
    if not given["resume"]:
        yield None
        return
    job = job_of(ctx.command.params, given, loaded)
    with open_journal(f"{given['output']}{ENDING}", job, on_kept) as journal:
        yield journal


def job_of(
    parameters: list[click.Parameter], given: Mapping[str, Any], loaded: LoadedModel
) -> dict[str, Any]:
    """What a run's answers depend on, by the names that its user gave: of files, the content."""
    options = {_name(p): given[str(p.name)] for p in parameters if p.name not in NOT_OF_THE_JOB}
    job = {name: _digest(v) if isinstance(v, Path) else v for name, v in options.items()}
    recipe = loaded.entry.recipe
    return {
        **job,
        "FILE": _digest(Path(given["file"])),
        "--dtype": recipe.dtype,
        "weights": recipe.identity,
    }


def _name(parameter: click.Parameter) -> str:
    return parameter.opts[-1] if isinstance(parameter, click.Option) else "FILE"


def _digest(path: Path) -> str:
    with reading(str(path)), path.open("rb") as file:
        digest = sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
        return f"sha256 {digest.hexdigest()[:16]}"
