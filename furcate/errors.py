"""Everything that can go wrong, as one tree; each error names the field, the value and what to do.

FurcateError
├── UserError              the caller can mend it                       exit code 2, HTTP 400
│   ├── BadRequest         an option or prompt out of range or unknown
│   ├── BadFile            a file is missing, truncated, misshapen or not what it claims to be
│   └── Unsupported        understood, but not something furcate does
├── Busy                   no room now; the same call may succeed later exit code 1, HTTP 429
│   └── OutOfPages         the paged KV cache is full
├── FetchFailed            a download did not finish                    exit code 1
├── StorageFailed          a file could not be written (disk full, ...)  exit code 1
└── RequestFailed          one request met an error; the others go on   exit code 1, HTTP 500
"""

from __future__ import annotations

__all__ = [
    "BadFile",
    "BadRequest",
    "Busy",
    "FetchFailed",
    "FurcateError",
    "OutOfPages",
    "RequestFailed",
    "StorageFailed",
    "Unsupported",
    "UserError",
]

_SHOWN = 80


class FurcateError(Exception):
    """Root of the tree.

    Args:
        what: one sentence that says what is wrong.
        field: the option, key, tensor or file at fault.
        value: what was found there; long values are cut when shown.
        hint: what the reader can do about it.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, field: str | None = None, value: object = None, hint: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.field = field
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        head = self.what if self.field is None else f"{self.field}: {self.what}"
        if self.value is not None:
            head += f" (got {_short(self.value)})"
        return head if self.hint is None else f"{head}; {self.hint}"


class UserError(FurcateError):
    """The caller can mend it."""

    exit_code = 2


class BadRequest(UserError):
    """An option or a prompt is out of range, unknown or contradictory."""


class BadFile(UserError):
    """A file is missing, truncated, misshapen or not what it claims to be."""


class Unsupported(UserError):
    """Understood, but not something furcate does; refused by name, never ignored."""


class Busy(FurcateError):
    """No room now; the same call may succeed later."""


class OutOfPages(Busy):
    """The paged KV cache has no free page left."""


class FetchFailed(FurcateError):
    """A download did not finish; nothing of it is kept."""


class StorageFailed(FurcateError):
    """A file could not be written; the last good one stays."""


class RequestFailed(FurcateError):
    """One request met an error; the others go on."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
