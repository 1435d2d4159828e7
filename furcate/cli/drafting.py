"""The flags of drafting as one record: furcate's own, and vLLM's in one piece of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from furcate.aliases import Drafting, from_vllm
from furcate.config import DraftOptions
from furcate.errors import BadRequest

__all__ = ["DraftFlags"]

_DRAFT = "Drafting"


@dataclass(frozen=True, slots=True)
class DraftFlags:
    """Who drafts, and how large its trees may be."""

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            "-d",
            help="ngram, off; a head of the target: eagle3, mtp, medusa, or a folder that holds "
            "one; a small model with the target's tokenizer; n-grams beside a head or model, as in "
            "ngram+mtp; hybrid is ngram+eagle3.",
            show_default="ngram",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "--nodes",
            "-n",
            help="Most drafted tokens a round, the root excluded; 0 drafts nothing.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    depth: Annotated[
        int | None,
        Option(
            help="Most drafted tokens in a row. Networks draft as many levels as pay, up to this; "
            "n-grams and Medusa all of them.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    topk: Annotated[
        int | None,
        Option(
            help="n-grams: most earlier matches followed. Others: most children of a node, and "
            "most nodes of a level that get any.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    tree: Annotated[
        str | None,
        Option(
            metavar="dynamic|FILE|JSON",
            help="dynamic: the most likely nodes of each level go on. Else a tree of fixed ranks: "
            "a list of rank paths, as Medusa's choices are, given here or in a file.",
            show_default="dynamic",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_vocab: Annotated[
        int | None,
        Option(
            help="Tokens that a head may propose: the target's most frequent ones.",
            show_default="the head's own, on a CPU at most 8192",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    beta: Annotated[
        float | None,
        Option(
            help="Heads and models: factor of the network's scores, at all depths.",
            show_default="fitted",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    sigma: Annotated[
        float | None,
        Option(
            help="Heads and models, where sampling: how far the target's scores scatter around "
            "the network's, in temperatures.",
            show_default="fitted",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    value_threshold: Annotated[
        float | None,
        Option(
            help="Draft no node that is less likely to be accepted than this.",
            show_default="0",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    entropy_children: Annotated[
        float | None,
        Option(
            metavar="K",
            help="Fewer children where the network is sure: 1 + K * (exp(entropy) - 1) at most.",
            show_default="off",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    entropy_gate: Annotated[
        float | None,
        Option(
            metavar="G",
            help="With --value-threshold: no children where the node's value times "
            "1 - sqrt(G * entropy) is below it.",
            show_default="off",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    coupled: Annotated[
        bool | None,
        Option(
            "--coupled/--uncoupled",
            help="Heads and models, where sampling: rank guesses with the noise that the target "
            "will draw, or without it, which accepts fewer.",
            show_default="coupled",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    adaptive: Annotated[
        bool | None,
        Option(
            "--adaptive/--fixed",
            help="Choose the size of each tree by its measured cost, or always draft --nodes.",
            show_default="adaptive",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    prompt_lookup_max: Annotated[
        int | None, Option(help="Longest suffix that n-grams match.", rich_help_panel=_DRAFT)
    ] = None
    prompt_lookup_min: Annotated[
        int | None, Option(help="Shortest suffix that n-grams match.", rich_help_panel=_DRAFT)
    ] = None
    speculative_config: Annotated[
        str | None,
        Option(
            metavar="JSON",
            help="vLLM's drafting options. SGLang's --speculative-... flags are understood too; "
            "its --speculative-num-draft-tokens counts the root.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    def chosen_drafter(self) -> str:
        """The drafter's name or path, n-grams where none is named."""
        return self._own_drafter() or self._alias().drafter or "ngram"

    def draft_options(self) -> DraftOptions:
        """furcate's own flags and vLLM's JSON together.

        Raises:
            BadRequest: something is named in both ways, or is out of range.
        """
        own = {name: value for name, value in self._own().items() if value is not None}
        alias = self._alias()
        twice = [name for name in own if name in alias.options]
        if self._own_drafter() and alias.drafter:
            twice.append("drafter")
        if twice:
            hint = "leave it out of one of them"
            what = "given by a flag and in --speculative-config"
            raise BadRequest(what, field=twice[0], hint=hint)
        return DraftOptions(**{**alias.options, **own})

    def check_kind(self, found: str) -> None:
        """Raises BadRequest where --speculative-config names another kind than was found."""
        self._alias().check_kind(found)

    def _own_drafter(self) -> str | None:
        if self.drafter is not None and not self.drafter.strip():
            hint = "ngram, off, a head, or a model"
            raise BadRequest("must not be empty", field="--drafter", value=self.drafter, hint=hint)
        return self.drafter

    def _own(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.nodes,
            "depth": self.depth,
            "topk": self.topk,
            "tree": None if self.tree is None else _tree(self.tree),
            "draft_vocab": self.draft_vocab,
            "beta": self.beta,
            "sigma": self.sigma,
            "value_threshold": self.value_threshold,
            "entropy_children": self.entropy_children,
            "entropy_gate": self.entropy_gate,
            "coupled": self.coupled,
            "adaptive": self.adaptive,
            "prompt_lookup_max": self.prompt_lookup_max,
            "prompt_lookup_min": self.prompt_lookup_min,
        }

    def _alias(self) -> Drafting:
        if self.speculative_config is None:
            return Drafting(None, {})
        field = "--speculative-config"
        try:
            config = json.loads(self.speculative_config)
        except json.JSONDecodeError as err:
            what = f"not JSON: {err.msg} at character {err.pos}"
            raise BadRequest(what, field=field, value=self.speculative_config) from None
        if not isinstance(config, dict):
            raise BadRequest("must be a JSON object", field=field, value=self.speculative_config)
        return from_vllm(config)


def _tree(word: str) -> Any:
    """A list of rank paths if the word is one, else the word: "dynamic", or a file's name."""
    if not word.lstrip().startswith("["):
        return word
    try:
        return json.loads(word)
    except json.JSONDecodeError as err:
        what = f"not JSON: {err.msg} at character {err.pos}"
        hint = "a list of rank paths, for example [[0], [1], [0, 0]]"
        raise BadRequest(what, field="--tree", value=word, hint=hint) from None
