"""The exceptions that a user can meet.

MlxBucketError
 ├── UsageError      an option, label set or template that cannot work   (exit code 2)
 ├── SourceError     a model that cannot be found, fetched or served     (exit code 1)
 ├── WeightsError    a conversion refused, or a damaged cache entry      (exit code 1)
 ├── InputError      an input file that cannot be read                   (exit code 1)
 ├── OutputError     an output that cannot be written                    (exit code 1)
 ├── ErrorLimitError more rows without an answer than are allowed        (exit code 1)
 └── RowError        one row that has no answer; the job goes on         (exit code 3)

Every message is a whole sentence that says what happened, where, and what to do next.
"""

from __future__ import annotations


class MlxBucketError(Exception):
    """Base of every error that is shown to a user without a traceback."""

    exit_code = 1


class UsageError(MlxBucketError):
    """An option, a label set or a template that cannot work."""

    exit_code = 2


class SourceError(MlxBucketError):
    """A model that cannot be found, fetched or served."""


class WeightsError(MlxBucketError):
    """A conversion that was refused, or a damaged entry of the weight cache."""


class InputError(MlxBucketError):
    """An input file that cannot be read; the message names file, line and column."""


class OutputError(MlxBucketError):
    """An output that cannot be written; the message names the file."""


class ErrorLimitError(MlxBucketError):
    """More rows have no answer than the user allows; the message names the last of them."""


class RowError(MlxBucketError):
    """One row that has no answer. Its message goes to the row's ``error`` column."""

    exit_code = 3
