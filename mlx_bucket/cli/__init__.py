"""The command line. Each command is a small file; it is imported only when it is called, so that
``--help`` answers at once. Errors of ours become one sentence and an exit code, never a traceback.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import cast

import click

from mlx_bucket.errors import MlxBucketError

COMMANDS = {
    "convert": "Fetch a model and convert its weights for MLX, once.",
    "plan": "Show the batches that classify would run, without weights.",
    "classify": "Give each text of a file one of your labels.",
    "parity": "Prove that no answer differs from Transformers'.",
    "bench": "Measure every strategy in turn, and write a report.",
    "compare": "Measure MLX against PyTorch on this machine.",
    "workload": "Make a file of support tickets to try things on.",
    "cache": "List, verify or remove converted weights.",
    "env": "Print device, number format, memory and versions.",
}
INTERRUPTED = 130
CANNOT_WRITE = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"mlx_bucket.cli.{name}")
        return cast(click.Command, getattr(module, name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MlxBucketError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-bucket", prog_name="mlx-bucket")
def commands() -> None:
    """Turn thousands of short texts into labels with a small language model.

    \b
    mlx-bucket convert  Qwen/Qwen2.5-0.5B-Instruct
    mlx-bucket plan     tickets.csv --text body --labels billing,technical,account
    mlx-bucket classify tickets.csv --text body --labels billing,technical,account -o out.csv
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx-bucket`` and ``python -m mlx_bucket``."""
    _prepare_output()
    try:
        commands.main(args=arguments, prog_name="mlx-bucket")
    except OSError as error:
        if error.filename is not None or error.errno not in CANNOT_WRITE:
            raise
        click.echo(f"Error: Standard output cannot be written: {error.strerror}.", err=True)
        sys.exit(1)
    finally:
        _drop_unwritten()


def _prepare_output() -> None:
    """See to it that both outputs are there, and that every character can be written.

    A closed output would be None here, and its number would go to the next file that is opened. A
    pipe or file gets UTF-8, as ``-o FILE`` does; a terminal keeps the encoding that it can show.
    """
    if sys.stdout is None:
        # Opened for reading only: writing is then refused, as it should be for a closed output.
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = None if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _drop_unwritten() -> None:
    """Forget what could not be written, which the interpreter would try once more at its end."""
    if sys.stdout.closed:  # by the command that failed to write
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
