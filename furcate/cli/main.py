"""The `furcate` command: gathers the subcommands, and turns every error into one line."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import furcate
from furcate.cli import bench, chat, generate, heads, models, train, tune
from furcate.cli.flags import spread
from furcate.cli.sglang import own_words
from furcate.errors import FurcateError

__all__ = ["app", "main", "run"]

_TRACEBACK = "--traceback"
_INTERRUPTED = 130  # 128 + SIGINT, as shells expect

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Tree speculative decoding that changes no token of what the model says.",
)
app.command("generate")(spread(generate.generate))
app.command("chat")(spread(chat.chat))
app.command("bench")(spread(bench.bench))
app.command("train")(spread(train.train))
app.add_typer(models.app, name="models")
app.add_typer(heads.app, name="heads")
app.add_typer(tune.app, name="tune")


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"furcate {furcate.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version."),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(_TRACEBACK, help="Show where in furcate an error arose.")
    ] = False,
) -> None:
    """Read by `run` and by callbacks; commands see none of these."""


def main() -> None:
    """Entry point of the `furcate` script."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Carry out a command line and return its exit code.

    2 is the user's mistake, 1 a failure that is not, 130 an interruption.
    """
    try:
        return _invoked(own_words(_without_traceback(words)))
    except FurcateError as err:
        _show_where(words)
        _say(f"error: {err}")
        return err.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return _INTERRUPTED
    except Exception as err:  # noqa: BLE001  # the last line of defence, and it says so
        _show_where(words)
        _say(f"internal error: {type(err).__name__}: {err}")
        if not _wants_traceback(words):
            _say(f"this is a fault in furcate; please report it with the output of {_TRACEBACK}")
        return 1


def _invoked(words: Sequence[str]) -> int:
    try:
        line = shlex.join(["furcate", *words])  # what reports and provenance name as their command
        app(args=list(words), prog_name="furcate", obj=line)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            raise KeyboardInterrupt from None
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _flags_end(words: Sequence[str]) -> int:
    """Where flags may no longer stand: what follows `--` is text."""
    return words.index("--") if "--" in words else len(words)


def _wants_traceback(words: Sequence[str]) -> bool:
    return _TRACEBACK in words[: _flags_end(words)]


def _without_traceback(words: Sequence[str]) -> list[str]:
    end = _flags_end(words)
    return [*(word for word in words[:end] if word != _TRACEBACK), *words[end:]]


def _show_where(words: Sequence[str]) -> None:
    if _wants_traceback(words):
        traceback.print_exc()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # the one place that tells of errors


if __name__ == "__main__":
    main()
