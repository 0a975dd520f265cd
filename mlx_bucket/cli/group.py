"""The commands by name. Each is a small file; it is imported only when it is called, so that
``--help`` answers at once. Errors of ours become one sentence and an exit code, never a traceback.
"""

from __future__ import annotations

import importlib
from typing import cast

import click

from mlx_bucket.cli import INTERRUPTED
from mlx_bucket.errors import MlxBucketError

COMMANDS = {
    "convert": "Fetch a model and convert its weights for MLX, once.",
    "plan": "Show the batches that classify would run, without weights.",
    "classify": "Give each text of a file one of your labels.",
    "generate": "Answer each text of a file in free words.",
    "extract": "Draw a JSON value out of each text of a file, by a schema.",
    "parity": "Prove that no answer differs from Transformers'.",
    "bench": "Measure every strategy in turn, and write a report.",
    "compare": "Measure MLX against PyTorch on this machine.",
    "workload": "Make a file of support tickets to try things on.",
    "cache": "List, verify or remove converted weights.",
    "env": "Print device, number format, memory and versions.",
}


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
    """Turn thousands of short texts into labels or JSON with a small language model.

    \b
    mlx-bucket convert  Qwen/Qwen2.5-0.5B-Instruct
    mlx-bucket plan     tickets.csv --text body --labels billing,technical,account
    mlx-bucket classify tickets.csv --text body --labels billing,technical,account -o out.csv
    """
