"""One head in training: a batch's losses of all its steps, and the step of its weights.

Legend: T rows of a batch, F features of this head, N rows with a loss, K steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.heads.medusa import Medusa
from furcate.heads.places import Head
from furcate.kernels.soft_cross_entropy import Scores
from furcate.models.decoder import Attend
from furcate.train.batches import Batch
from furcate.train.loss import Teacher, grade
from furcate.train.optimizer import Masters
from furcate.train.recipe import HeadPlan, Recipe
from furcate.train.unroll import Forward, unroll

__all__ = ["Learner", "mean_scores"]


class Learner:
    """A head and its optimiser.

    Args:
        plan: what the head is.
        head: its network, with the weights to start from.
        recipe: of the run.
    """

    def __init__(self, plan: HeadPlan, head: Head, recipe: Recipe) -> None:
        self.plan = plan
        self.head = head
        self.masters = Masters(dict(head.named_parameters()), recipe)
        self._recipe = recipe
        self._forward = _compiled(head) if recipe.compile else None
        self._depth_weights = recipe.depth_weights(plan.steps)

    def learn(self, features_TF: Tensor, batch: Batch, teacher: Teacher) -> Tensor:
        """Gradients of the loss into the weights; means [K, 3] as `mean_scores` gives them."""
        recipe, finals, slopes, means = self._recipe, [], [], []
        steps = unroll(self.head, features_TF, batch, self.plan.steps, self._forward)
        for step, final_NC in enumerate(steps, start=1):
            valid_N = (batch.rows(step) < len(batch.positions_T)).float()
            weight_N = valid_N * (self._depth_weights[step - 1] / len(valid_N))
            with torch.no_grad():
                graded = grade(
                    final_NC.detach(), teacher, weight_N, recipe.objective, recipe.loss_rows
                )
            finals.append(final_NC)
            slopes.append(graded.slope_NC)
            means.append(mean_scores(graded.scores, valid_N))
        torch.autograd.backward(finals, slopes)
        return torch.stack(means)


def _compiled(head: Head) -> Forward | None:
    """The head's pass with all but attention fused; None for heads without a pass of rows."""
    if isinstance(head, Medusa):
        return None
    # attention has its own backward pass and kernels, which a compiler cannot look into
    fused = torch.compile(head, dynamic=False)

    def forward(tokens_T: Tensor, state_TC: Tensor, at_T: Tensor, attend: Attend) -> Tensor:
        apart = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
        out_TC: Tensor = fused(tokens_T, state_TC, at_T, apart)
        return out_TC

    return forward


def mean_scores(scores: Scores, valid_N: Tensor) -> Tensor:
    """Cross entropy, overlap and agreement, averaged over the rows that count: [3]."""
    all_3N = torch.stack((scores.loss_N, scores.overlap_N, scores.agree_N)).float()
    return (all_3N * valid_N).sum(1) / valid_N.sum().clamp(min=1)
