"""Options that several commands share, each group a decorator, and what they are read into."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from mlx_bucket.cache import Quantisation
from mlx_bucket.errors import InputError, UsageError
from mlx_bucket.jobs.formats import Format
from mlx_bucket.jobs.readers import Reader, open_reader, require_column
from mlx_bucket.loading import load_model
from mlx_bucket.planning import MOST
from mlx_bucket.sources import DEFAULT_PRESET
from mlx_bucket.weights import LoadedModel

Command = TypeVar("Command", bound=Callable[..., Any])
DTYPE_HELP = "auto, float16, bfloat16 or float32; auto is float16 on a GPU, float32 on a CPU."
PATH = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1, max=MOST)
Labels = Sequence[str] | Mapping[str, str]


def input_options(command: Command) -> Command:
    """FILE and how to read it."""
    return _input_options(command, required=True)


def optional_input_options(command: Command) -> Command:
    """The same for a command that can do without FILE."""
    return _input_options(command, required=False)


def _input_options(command: Command, *, required: bool) -> Command:
    for option in (
        click.option("--limit", type=COUNT, help="Read at most so many rows of the file."),
        click.option("--encoding", default="utf-8", show_default=True, help="Encoding of a CSV."),
        click.option("--delimiter", help="Delimiter of a CSV; found in its first line if absent."),
        click.option(
            "--format",
            "input_format",
            type=click.Choice(get_args(Format)),
            help="Format of FILE; by its ending if absent.",
        ),
        click.option(
            "--text", "column", required=required, help="The column (or key) with the texts."
        ),
        click.argument("file", type=click.Path(allow_dash=True), required=required),
    ):
        command = option(command)
    return command


def window_option(command: Command) -> Command:
    """How many rows are held at a time."""
    return click.option(
        "--window",
        type=COUNT,
        default=16384,
        show_default=True,
        help="Rows that are read, planned and run at a time.",
    )(command)


def task_options(command: Command) -> Command:
    """Model, labels and prompt."""
    for option in (
        prompt_options("{instruction}, {labels}", "{labels} in it stands for the list of labels"),
        click.option(
            "--labels-file",
            type=PATH,
            help="A text file with one label a line, or a .json object of label to description.",
        ),
        click.option("--labels", help='The labels as one CSV record: a,b,"c, d".'),
        model_options,
    ):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """Which model, in which number format."""
    for option in (
        click.option("--dtype", default="auto", show_default=True, help=DTYPE_HELP),
        click.option("--q-group-size", type=int, help="Weights that share a scale; 64 if absent."),
        click.option("--q-bits", type=int, help="Use weights quantised to so many bits."),
        click.option("--revision", help="Branch, tag or commit of a model from the hub."),
        click.option(
            "--model",
            default=DEFAULT_PRESET,
            show_default=True,
            help="A preset, a local folder, a .gguf file, or a hub id.",
        ),
    ):
        command = option(command)
    return command


def prompt_options(places: str, remark: str | None = None) -> Callable[[Command], Command]:
    """What the model is told; ``places`` are those of a template, and a remark may follow."""

    def decorated(command: Command) -> Command:
        for option in (
            click.option(
                "--show-prompt", is_flag=True, help="Print the prompt around the text, and go on."
            ),
            click.option(
                "--truncate",
                is_flag=True,
                help="Cut the end of a text longer than the context window.",
            ),
            click.option(
                "--template",
                type=PATH,
                help=f"A text file with the user message: {{text}}, and if wanted {places}."
                " For a model without a chat template: the whole prompt.",
            ),
            click.option(
                "--instruction",
                help=f"What the model is told{f'; {remark}' if remark else ''}.",
            ),
        ):
            command = option(command)
        return command

    return decorated


def strategy_option(command: Command) -> Command:
    """Which strategies; ``subject.chosen_by_title`` reads it."""
    return click.option(
        "--strategy",
        "strategies",
        multiple=True,
        help="Run only the strategies with this title, or that begin so; may be repeated.",
    )(command)


def batch_options(command: Command) -> Command:
    """How buckets are cut."""
    for option in (
        click.option(
            "--launch-cost",
            type=click.IntRange(min=0, max=MOST),
            help="Tokens of padding that one bucket fewer is worth; measured once if absent.",
        ),
        click.option(
            "--token-budget",
            type=COUNT,
            help="Tokens that one bucket may forward; from the memory if absent.",
        ),
        click.option(
            "--batch-size",
            type=COUNT,
            help="Fixed buckets of so many rows, sorted by length, instead of planned ones.",
        ),
    ):
        command = option(command)
    return command


def writing_options(command: Command) -> Command:
    """How answers are written, and how many together."""
    for option in (
        click.option(
            "--launch-cost",
            type=click.IntRange(min=0, max=MOST),
            help="Tokens that one forward pass fewer is worth; measured once if absent.",
        ),
        click.option(
            "--token-budget",
            type=COUNT,
            help="Tokens that one forward pass may read; from the memory if absent.",
        ),
        click.option(
            "--batch-size",
            type=COUNT,
            default=32,
            show_default=True,
            help="Rows that are written together; fewer if the memory does not hold them.",
        ),
        click.option(
            "--max-tokens",
            type=COUNT,
            default=256,
            show_default=True,
            help="Tokens of the longest answer.",
        ),
    ):
        command = option(command)
    return command


def output_options(command: Command) -> Command:
    """Where answers and summary go."""
    for option in (
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print the summary as JSON on stdout; needs -o FILE.",
        ),
        click.option(
            "--errors",
            "errors_file",
            type=click.Path(dir_okay=False),
            help="Write rows that have an error here too, with their own columns, to be mended.",
        ),
        click.option(
            "--max-errors",
            type=click.IntRange(min=0),
            help="End the run when more rows than this have an error; no limit if absent.",
        ),
        click.option(
            "--on-error",
            type=click.Choice(["skip", "fail"]),
            default="skip",
            show_default=True,
            help="What a row that has an error does: it is skipped, or the run ends there.",
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Keep a journal beside the output, and go on with the one that is there: a run"
            " that was cut off goes on by the same command line.",
        ),
        click.option("--overwrite", is_flag=True, help="Replace the output if it exists."),
        click.option(
            "-o",
            "--output",
            default="-",
            show_default=True,
            help="Where the answers go, - for stdout; in the format of its ending, or that of"
            " FILE.",
        ),
    ):
        command = option(command)
    return command


def read_labels(labels: str | None, labels_file: Path | None) -> Labels:
    """The labels of ``--labels`` or ``--labels-file``, whichever is given.

    Raises:
        UsageError: none or both are given, or the file does not hold labels.
    """
    if labels is not None and labels_file is None:
        return csv_record(labels, "--labels", " or use --labels-file")
    if labels_file is None or labels is not None:
        raise UsageError("Give the labels either with --labels or with --labels-file.")
    text = text_of_file(labels_file, "labels file")
    if labels_file.suffix.lower() == ".json":
        return _from_json(text, labels_file)
    return [line.strip() for line in text.split("\n") if line.strip()]


def open_input(given: Mapping[str, Any]) -> Reader:
    """A reader of FILE, which has the column of the texts."""
    reader = open_reader(
        given["file"],
        format=given["input_format"],
        delimiter=given["delimiter"],
        encoding=given["encoding"],
    )
    try:
        require_column(reader, given["column"])
    except InputError:
        reader.close()
        raise
    return reader


def prompt_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options say of the prompt, as ``build_task`` and ``Classifier`` take it."""
    return {
        "instruction": given["instruction"],
        "template": _read_template(given["template"]),
        "truncate": given["truncate"],
    }


def read_model(given: Mapping[str, Any]) -> LoadedModel:
    """The model of ``--model``, in the number format of the options beside it."""
    return load_model(
        given["model"],
        dtype=given["dtype"],
        revision=given["revision"],
        quantisation=read_quantisation(given["q_bits"], given["q_group_size"]),
        progress=True,
    )


def read_quantisation(bits: int | None, group_size: int | None) -> Quantisation | None:
    """The quantisation of ``--q-bits`` and ``--q-group-size``, if there is one.

    Raises:
        UsageError: a group size is given without bits, or a number is not served.
    """
    if bits is None and group_size is not None:
        raise UsageError("--q-group-size needs --q-bits.")
    if bits is None:
        return None
    return Quantisation(bits) if group_size is None else Quantisation(bits, group_size)


def _read_template(path: Path | None) -> str | None:
    """The text of a template file, without the line break at its end."""
    return None if path is None else text_of_file(path, "template file").removesuffix("\n")


def text_of_file(path: Path, what: str) -> str:
    """The text of a small file that the user named.

    Raises:
        UsageError: it cannot be read; the message names it as ``what``.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"The {what} {path} is not UTF-8; save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(
            f"The {what} {path} cannot be read ({error.strerror or error}); give another file."
        ) from error


def csv_record(given: str, option: str, otherwise: str = "") -> list[str]:
    """The fields of an option that is one CSV record, without white space around them.

    Raises:
        UsageError: it is none; the message says what can be done ``otherwise``.
    """
    try:
        (record,) = csv.reader([given], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as error:
        raise UsageError(
            f"{option} {given!r} is not one CSV record ({error}); "
            f"write {option} 'a,b,\"c, d\"'{otherwise}."
        ) from error
    return [field.strip() for field in record]


def json_of(text: str, what: str, pairs_hook: Callable[..., Any] | None = None) -> Any:
    """The value of a JSON file.

    Raises:
        UsageError: it is none; the message names it as ``what``.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except json.JSONDecodeError as error:
        raise UsageError(f"The {what} is not JSON: {error.msg} in line {error.lineno}.") from error
    except (RecursionError, ValueError) as error:  # nested without end, or a number without end
        raise UsageError(f"The {what} is not JSON that can be read: {error}.") from error


def _from_json(text: str, path: Path) -> dict[str, str]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name.strip() in found:
                raise UsageError(
                    f"The labels file {path} names {name.strip()!r} twice; keep one of them."
                )
            found[name.strip()] = value
        return found

    found = json_of(text, f"labels file {path}", once)
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise UsageError(
            f"The labels file {path} must hold one JSON object of label to description, "
            'such as {"billing": "invoices and charges", "other": "anything else"}.'
        )
    return found
