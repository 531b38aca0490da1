"""The errors that a user can mend. Each message is one line: what was wrong, where, what to do."""

from __future__ import annotations


class QKNormError(Exception):
    """Base of the errors below; the command line prints its message and exits with `exit_code`."""

    exit_code = 2


class InputError(QKNormError):
    """The input cannot be used: not an ONNX file, an unknown target or name, a missing extra, damaged weights."""


class FusionRequiredError(QKNormError):
    """`require_fusion` was asked for, and not every QK-Norm attention became one node."""

    exit_code = 1
