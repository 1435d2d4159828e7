"""What a training run is, setting by setting: two runs of one recipe on one machine are equal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from furcate.errors import BadRequest
from furcate.heads.spec import HeadSpec, MedusaSpec
from furcate.kernels.soft_cross_entropy import Objective

__all__ = ["HeadPlan", "Recipe"]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """One head to be trained: its name in the run, what it is, and how many steps deep.

    A recurrent head is unrolled for `steps` steps, fed with its own states as at run time; of
    Medusa each step is a head of its own. The output matrix is the target's and stays as it is.
    """

    name: str
    spec: HeadSpec
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadRequest("must be at least 1", field=f"{self.name} steps", value=self.steps)
        if isinstance(self.spec, MedusaSpec) and self.steps != self.spec.num_heads:
            what = f"a Medusa of {self.spec.num_heads} heads has as many steps"
            raise BadRequest(what, field=f"{self.name} steps", value=self.steps)
        if self.spec.own_output or getattr(self.spec, "own_embedding", False):
            what = "heads are trained with the target's embeddings and output matrix"
            raise BadRequest(what, field=f"{self.name} own_output, own_embedding", value=True)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a run.

    The learning rate rises linearly for `warmup_steps`, then follows half a cosine down to
    `last_rate` times its peak, by tokens seen of `tokens`, or by time of `minutes`: one of the two.
    """

    heads: tuple[HeadPlan, ...]
    tokens: int | None = None  # passes of tokens through the target, repetitions included
    minutes: float | None = None  # of training, over all interrupted parts of the run
    seed: int = 0
    batch_tokens: int = 32_768
    rate: float = 1.5e-3
    warmup_steps: int = 60
    last_rate: float = 0.02
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, adamw for the rest
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of a head's gradient
    depth_decay: float = 0.85  # weight of step k: depth_decay ** (k - 1), normalised
    objective: Objective = field(default_factory=Objective)
    loss_vocab: int = 16_384  # tokens that a batch's loss looks at
    loss_rows: int = 8_192  # rows whose scores exist at once
    compile: bool = False  # let inductor fuse what lies around attention; costs a minute at first
    held_out: int = 64  # conversations kept for measuring
    held_out_seconds: float = 120.0  # between measurements
    checkpoint_seconds: float = 60.0
    log_steps: int = 20

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            what = "give either tokens or minutes"
            raise BadRequest(what, field="tokens", value=self.tokens)
        if self.optimizer not in ("adamw", "muon"):
            hint = "known: adamw, muon"
            raise BadRequest(
                "unknown optimizer", field="optimizer", value=self.optimizer, hint=hint
            )
        names = [plan.name for plan in self.heads]
        if not names or len(set(names)) != len(names):
            raise BadRequest("must be heads of different names", field="heads", value=names)
        for name in ("tokens", "minutes", "batch_tokens", "rate", "loss_vocab", "loss_rows"):
            self._check(name, least=0, itself=False)
        for name in ("clip", "depth_decay", "held_out", "log_steps", "checkpoint_seconds"):
            self._check(name, least=0, itself=False)
        for name in ("warmup_steps", "last_rate", "weight_decay", "held_out_seconds"):
            self._check(name, least=0, itself=True)

    @property
    def lookahead(self) -> int:
        """Steps of the deepest head."""
        return max(plan.steps for plan in self.heads)

    def depth_weights(self, steps: int) -> tuple[float, ...]:
        """How much each step's loss counts; their sum is 1."""
        raw = [self.depth_decay**k for k in range(steps)]
        return tuple(weight / sum(raw) for weight in raw)

    def to_json(self) -> dict[str, Any]:
        """All settings, for provenance and to tell whether two runs are of one recipe."""
        return asdict(self)

    def _check(self, name: str, *, least: float, itself: bool) -> None:
        value = getattr(self, name)
        if value is not None and not (value > least or (itself and value == least)):
            bound = f"must be {least} or more" if itself else f"must be above {least}"
            raise BadRequest(bound, field=name, value=value)
