"""`furcate train`: make draft heads for a target, from text that it writes itself or is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from furcate.cli.lazy import train_module
from furcate.cli.options import EMBEDDED, Json
from furcate.cli.show import err, out, print_json
from furcate.cli.train_show import TextBar, TrainingBar, head_lines, text_line
from furcate.errors import BadRequest

if TYPE_CHECKING:
    from furcate.train.prepare import Target, Text
    from furcate.train.run import Outcome

__all__ = ["train"]

_TEXT, _TARGET, _TRAINING, _HEADS = "Text", "Target", "Training", "Heads"
_WITH_MLP = ("eagle1", "eagle3", "mtp")


class Head(StrEnum):
    """The kinds of heads."""

    MEDUSA = "medusa"
    EAGLE1 = "eagle1"
    EAGLE3 = "eagle3"
    MTP = "mtp"


class Loss(StrEnum):
    """What training makes small."""

    SOFT_CE = "soft_ce"
    LK = "lk"


class Optimizer(StrEnum):
    """How weights are moved."""

    ADAMW = "adamw"
    MUON = "muon"


@dataclass(frozen=True, slots=True)
class WhatFlags:
    """What is made, and where it goes."""

    kinds: Annotated[
        list[Head],
        Argument(help="One or more kinds of heads; they share each pass through the target."),
    ]
    out: Annotated[
        Path,
        Option("--out", "-o", help="A folder for the text, the heads and what is left to resume."),
    ]
    resume: Annotated[bool, Option("--resume", help="Go on where an interrupted run stopped.")] = (
        False
    )
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Of all that is drawn.")] = 0


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """For which model, and where it runs."""

    target: Annotated[
        str,
        Option(
            "--target",
            "-t",
            help="A name that `furcate models` lists, a Hugging Face folder, or a GGUF file.",
            rich_help_panel=_TARGET,
        ),
    ] = EMBEDDED
    dtype: Annotated[
        str, Option(help="auto, float64, float32, bfloat16 or float16.", rich_help_panel=_TARGET)
    ] = "auto"
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_TARGET)] = (
        "auto"
    )


@dataclass(frozen=True, slots=True)
class TextFlags:
    """What the heads learn from."""

    data: Annotated[
        str,
        Option(
            metavar="self|FILE|FOLDER",
            help="self: the target writes conversations. FILE.jsonl: a JSON object a line, with "
            "`messages` or `conversations`. FOLDER: text that an earlier run wrote.",
            rich_help_panel=_TEXT,
        ),
    ] = "self"
    data_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Tokens of text at least.",
            show_default="all of a file; self: 64 million on a GPU, 200,000 on a CPU",
            rich_help_panel=_TEXT,
        ),
    ] = None
    data_context: Annotated[
        int | None,
        Option(
            min=16,
            help="Longest conversation, in tokens.",
            show_default="1280",
            rich_help_panel=_TEXT,
        ),
    ] = None
    write_batch: Annotated[
        int | None,
        Option(
            min=1,
            max=4096,
            help="Conversations that the target writes at once.",
            show_default="1024 on a GPU, 16 on a CPU",
            rich_help_panel=_TEXT,
        ),
    ] = None
    held_away: Annotated[
        list[Path] | None,
        Option(
            help="Prompts for evaluation, a JSON object a line: conversations that hold one are "
            "left out. May be given again.",
            show_default="the source tree's benchmark, where there is one",
            rich_help_panel=_TEXT,
        ),
    ] = None
    only_data: Annotated[
        bool,
        Option("--only-data", help="Stop once the text is there.", rich_help_panel=_TEXT),
    ] = False

    def refuse_unused(self) -> None:
        """Refuse what would change nothing.

        Raises:
            BadRequest: an option does not go with the kind of data.
        """
        unused: dict[str, object] = (
            {} if self.data == "self" else {"--write-batch": self.write_batch}
        )
        if Path(self.data).is_dir() and self.data != "self":
            unused |= {"--data-tokens": self.data_tokens, "--data-context": self.data_context}
            unused |= {"--held-away": self.held_away}
        for flag, value in unused.items():
            if value is not None:
                hint = "leave it out"
                what = f"changes nothing with --data {self.data}"
                raise BadRequest(what, field=flag, value=value, hint=hint)


@dataclass(frozen=True, slots=True)
class RunFlags:
    """How long and how heads are trained, and how large they are."""

    tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Tokens passed through the target, repetitions included.",
            show_default="three times the text",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    minutes: Annotated[
        float | None, Option(help="Minutes of training instead.", rich_help_panel=_TRAINING)
    ] = None
    batch_tokens: Annotated[
        int | None,
        Option(
            min=64,
            help="Tokens of a step.",
            show_default="32,768 on a GPU, 2,048 on a CPU",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    unroll: Annotated[
        int,
        Option(
            min=1, max=16, help="Steps that heads draft in training.", rich_help_panel=_TRAINING
        ),
    ] = 6
    loss: Annotated[
        Loss,
        Option(
            help="soft_ce: cross entropy with the target's law. lk: acceptance, more and more.",
            rich_help_panel=_TRAINING,
        ),
    ] = Loss.SOFT_CE
    optimizer: Annotated[
        Optimizer,
        Option(help="muon is for matrices, with adamw for the rest.", rich_help_panel=_TRAINING),
    ] = Optimizer.ADAMW
    lr: Annotated[
        float | None,
        Option(help="Peak learning rate.", show_default="0.0015", rich_help_panel=_TRAINING),
    ] = None
    mlp: Annotated[
        list[str] | None,
        Option(
            metavar="KIND=SIZE",
            help="Size of a head's MLP; may be given again.",
            show_default="the target's",
            rich_help_panel=_HEADS,
        ),
    ] = None
    layers: Annotated[
        str | None,
        Option(
            metavar="N,N,...",
            help="States of the target that eagle3 reads; 0 is the embedding's output.",
            show_default="near the bottom, the middle and the top",
            rich_help_panel=_HEADS,
        ),
    ] = None
    medusa_heads: Annotated[
        int, Option(min=1, max=16, help="Tokens that medusa guesses.", rich_help_panel=_HEADS)
    ] = 4
    medusa_layers: Annotated[
        int, Option(min=1, max=8, help="Layers of each of its heads.", rich_help_panel=_HEADS)
    ] = 1
    draft_vocab: Annotated[
        int,
        Option(
            min=1, help="Tokens that a head proposes unless asked for more.", rich_help_panel=_HEADS
        ),
    ] = 16_384

    def mlp_sizes(self) -> dict[str, int]:
        """`mlp` by kind.

        Raises:
            BadRequest: a word is not KIND=SIZE, or a kind has none or two.
        """
        sizes: dict[str, int] = {}
        for word in self.mlp or ():
            kind, _, size = word.partition("=")
            if kind not in _WITH_MLP or not size.isdecimal() or int(size) < 1 or kind in sizes:
                hint = f"for example eagle3=1536, once for each of {', '.join(_WITH_MLP)}"
                raise BadRequest("must be KIND=SIZE", field="--mlp", value=word, hint=hint)
            sizes[kind] = int(size)
        return sizes

    def layer_numbers(self) -> tuple[int, ...] | None:
        """`layers` as numbers.

        Raises:
            BadRequest: they are not.
        """
        if self.layers is None:
            return None
        words = self.layers.split(",")
        if not all(word.isdecimal() and len(word) < 6 for word in words):
            hint = "for example 2,15,29"
            raise BadRequest("must be numbers", field="--layers", value=self.layers, hint=hint)
        return tuple(int(word) for word in words)


def train(
    ctx: Context,
    what: WhatFlags,
    text: TextFlags,
    run: RunFlags,
    model: ModelFlags,
    as_json: Json = False,
) -> None:
    """Train draft heads for a target.

    The text comes first, in OUT/text: tokens only, kept for later runs. Then the heads are trained
    on it; each gets a folder of its name in OUT. An interrupted run goes on with --resume.
    """
    _check(what, text, run)
    with _resumable():
        with err().status(f"loading {model.target} ..."):
            target = train_module().Target.load(model.target, model.dtype, model.device)
        found = _text(target, what, text)
        record: dict[str, Any] = {"target": model.target, "text": found.to_json()}
        if not as_json:
            out().print(text_line(record["text"]), markup=False)
        outcome = None if text.only_data else _outcome(target, found, what, run, ctx.obj)
        if outcome is not None:
            record["training"] = train_module().outcome_json(outcome)
        if as_json:
            print_json(record)
        elif outcome is not None:
            for line in head_lines(record["training"]):
                out().print(line, markup=False)
        if outcome is not None and not outcome.finished:
            raise KeyboardInterrupt


def _check(what: WhatFlags, text: TextFlags, run: RunFlags) -> None:
    """What is wrong is told before anything is loaded."""
    text.refuse_unused()
    run.mlp_sizes()
    run.layer_numbers()
    if len(set(what.kinds)) < len(what.kinds):
        raise BadRequest("a kind is named twice", field="kinds", value=[str(k) for k in what.kinds])
    if run.tokens is not None and run.minutes is not None:
        hint = "leave one of them out"
        raise BadRequest("excludes --tokens", field="--minutes", value=run.minutes, hint=hint)
    if what.out.exists() and not what.out.is_dir():
        hint = "name a folder"
        raise BadRequest("is a file", field="--out", value=str(what.out), hint=hint)


def _text(target: Target, what: WhatFlags, text: TextFlags) -> Text:
    preparing = train_module()
    asked = preparing.TextAsked(
        data=text.data,
        path=what.out / "text",
        tokens=text.data_tokens,
        batch=text.write_batch,
        seed=what.seed,
        context=text.data_context or preparing.CONTEXT,
        held_away=tuple(text.held_away or preparing.default_held_away()),
        resume=what.resume,
    )
    with TextBar() as bar:
        found: Text = preparing.prepare(target, asked, bar.told)
    return found


def _outcome(target: Target, text: Text, what: WhatFlags, run: RunFlags, command: str) -> Outcome:
    training = train_module()
    shape = training.Shape(
        steps=run.unroll,
        layers=run.layer_numbers(),
        medusa_heads=run.medusa_heads,
        medusa_layers=run.medusa_layers,
        draft_vocab=run.draft_vocab,
    )
    asked = training.TrainingAsked(
        kinds=tuple(kind.value for kind in what.kinds),
        out=what.out,
        resume=what.resume,
        seed=what.seed,
        command=command,
        shape=shape,
        mlp=run.mlp_sizes(),
        tokens=run.tokens,
        minutes=run.minutes,
        batch_tokens=run.batch_tokens,
        loss=run.loss.value,
        optimizer=run.optimizer.value,
        rate=run.lr,
    )
    with TrainingBar() as bar:
        outcome: Outcome = training.trained(target, text, asked, bar.told)
    return outcome


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err().print("what is done so far is kept; go on with the same command and --resume")
        raise
