"""The embedded model on real text against transformers, weights read by transformers itself."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from furcate.models.causal import causal_attend
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder

TEXT = """The sky is blue because molecules of air scatter short waves of light more than long ones.
A violet sky would be the consequence of that rule alone; but the sun sends less violet than blue,
and our eyes answer to it less. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + ...
In 1871 Lord Rayleigh published the formula: intensity grows with the fourth power of frequency."""

# transformers differs from itself by 1e-4 here (cached against full pass, logits up to 40)
ABSOLUTE = 3e-4
OF_THE_LARGEST = 1e-5


@pytest.fixture(scope="module")
def ours(embedded_model: Path) -> Decoder:
    return load_decoder(embedded_model, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokens_T(embedded_model: Path) -> Tensor:
    from furcate.text.tokenizer import load_tokenizer

    return torch.tensor(load_tokenizer(embedded_model).encode(TEXT))


@pytest.fixture(scope="module")
def theirs_TV(embedded_model: Path, tokens_T: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        embedded_model.parent,
        gguf_file=embedded_model.name,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.no_grad():
        found: Tensor = model.eval()(tokens_T[None]).logits[0]
    return found


def logits(decoder: Decoder, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(tokens_T, positions_T, causal_attend))


def disagreement(ours_TV: Tensor, theirs_TV: Tensor) -> str | None:
    """What the parity rule has against two sets of logits; None: nothing."""
    worst, largest = (ours_TV - theirs_TV).abs().max(), theirs_TV.abs().max()
    if worst > ABSOLUTE:
        return f"{worst} apart"
    if worst > OF_THE_LARGEST * largest:
        return f"{worst / largest} of the largest logit"
    best_T2 = theirs_TV.topk(2, -1).values
    clear_T = best_T2[:, 0] - best_T2[:, 1] > ABSOLUTE
    same_T = ours_TV.argmax(-1) == theirs_TV.argmax(-1)
    return None if bool(same_T[clear_T].all()) else "another token is likeliest"


@pytest.mark.usefixtures("all_cores")
def test_logits_on_real_text_equal_those_of_transformers(
    ours: Decoder, tokens_T: Tensor, theirs_TV: Tensor
) -> None:
    assert len(tokens_T) > 80
    ours_TV = logits(ours, tokens_T, torch.arange(len(tokens_T)))
    assert disagreement(ours_TV, theirs_TV) is None


@pytest.mark.usefixtures("all_cores")
def test_the_parity_rule_can_fail(ours: Decoder, tokens_T: Tensor, theirs_TV: Tensor) -> None:
    positions_T = torch.arange(len(tokens_T))
    positions_T[-1] += 1
    assert disagreement(logits(ours, tokens_T, positions_T), theirs_TV) is not None


@pytest.mark.usefixtures("all_cores")
def test_packed_weights_keep_parity(ours: Decoder, tokens_T: Tensor, theirs_TV: Tensor) -> None:
    packed = copy.deepcopy(ours)
    packed.pack()
    ours_TV = logits(packed, tokens_T, torch.arange(len(tokens_T)))
    assert disagreement(ours_TV, theirs_TV) is None
