"""The decoder by itself: no look at data, packed weights, dtypes, gradients."""

from __future__ import annotations

import pytest
import torch
from small_models import SMALL, fill_randomly, hf_model, small, tiny_decoder
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from furcate.errors import BadFile, Unsupported
from furcate.models.causal import causal_attend
from furcate.models.decoder import Decoder
from furcate.models.hf_config import spec_from_hf_config
from furcate.models.linear import Linear
from furcate.models.rope import Rope
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.weights import places

CPU = torch.device("cpu")


def random_decoder(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    config = hf_model(small(name)).config.to_dict()
    decoder = Decoder(spec_from_hf_config(config), dtype, CPU)
    fill_randomly(places(decoder), 0)
    return decoder


def logits(decoder: Decoder, rows: int = 20) -> Tensor:
    tokens_T = torch.randint(0, 60, (rows,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return decoder.logits(decoder(tokens_T, torch.arange(rows), causal_attend))


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.name)
def test_nothing_in_a_pass_looks_at_data(entry: object) -> None:
    """Fake tensors have no values: any branch on them or copy to the host raises."""
    config = hf_model(entry).config.to_dict()
    spec = spec_from_hf_config(config)
    with FakeTensorMode():
        decoder = Decoder(spec, torch.bfloat16, CPU)
        rows = torch.zeros(5, dtype=torch.int64)
        hidden_TC = decoder(rows, rows, causal_attend)
        assert hidden_TC.shape == (5, spec.hidden_size)
        assert decoder.logits(hidden_TC).shape == (5, spec.vocab_size)


def test_the_fake_tensor_check_can_fail() -> None:
    def curious(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q if q.sum() > 0 else causal_attend(layer, q, k, v)

    with FakeTensorMode():
        decoder = tiny_decoder_unfilled()
        rows = torch.zeros(5, dtype=torch.int64)
        with pytest.raises(DataDependentOutputException):
            decoder(rows, rows, curious)


def tiny_decoder_unfilled() -> Decoder:
    return Decoder(tiny_spec(), torch.float32, CPU)


def tiny_spec(**changes: object) -> DecoderSpec:
    sizes: dict[str, object] = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position": 64,
        "rope": RopeSpec(10000.0),
        "rope_layers": (True, True),
    }
    return DecoderSpec(**{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_layers": (True,)}, "rope_layers"),
        ({"rope": RopeSpec(1e4, "table", divisors=(1.0,))}, "rope.divisors"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadFile) as caught:
        tiny_spec(**changes)
    assert caught.value.field == field


# -- packed weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "llama_mlp_bias", "qwen3"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_packing_changes_results_by_rounding_only(name: str, rows: int) -> None:
    decoder = random_decoder(name)
    plain_TV = logits(decoder, rows)
    decoder.pack()
    off_TV = logits(decoder, rows) - plain_TV
    assert off_TV.abs().max() < 1e-4  # float32, logits of size 20; worst seen 2e-5


def test_a_lone_row_reads_the_plain_weights() -> None:
    """Its result does not depend on the packed copies."""
    decoder = random_decoder("llama_tied")
    decoder.pack()
    before_TV = logits(decoder, 1)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.packed = torch.zeros(1)
    assert torch.equal(logits(decoder, 1), before_TV)


def test_packing_twice_is_packing_once() -> None:
    decoder = random_decoder("llama")
    decoder.pack()
    once = logits(decoder)
    decoder.pack()
    assert torch.equal(logits(decoder), once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packing_other_dtypes_is_refused(dtype: torch.dtype) -> None:
    decoder = random_decoder("llama", dtype)
    assert not decoder.can_pack
    with pytest.raises(Unsupported, match="float32"):
        decoder.pack()


# -- dtypes, devices, gradients ----------------------------------------------------------------


def test_moving_to_another_dtype_keeps_the_frequencies_exact() -> None:
    spec = RopeSpec(500000.0)
    moved = Rope(spec, 64, torch.float32, CPU).to(torch.bfloat16)
    made = Rope(spec, 64, torch.bfloat16, CPU)
    positions_T = torch.tensor([0, 5, 4000])
    assert moved.freq_F.dtype == torch.float32
    assert torch.equal(moved(positions_T).cos_T1D, made(positions_T).cos_T1D)
    assert moved(positions_T).cos_T1D.dtype == torch.bfloat16


def test_a_float64_network_has_float64_angles() -> None:
    rope = Rope(RopeSpec(500000.0), 64, torch.float64, CPU)
    turn = rope(torch.tensor([100_000]))
    angle_F = 100_000 * 500000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    assert (turn.cos_T1D[0, 0, :32] - angle_F.cos()).abs().max() < 1e-10


def test_a_moved_decoder_equals_one_made_in_that_dtype() -> None:
    moved = tiny_decoder(torch.float64, seed=3).to(torch.float32)
    made = tiny_decoder(torch.float32, seed=3)
    assert moved.dtype == torch.float32
    assert torch.equal(logits(moved), logits(made))


def test_gradients_reach_every_parameter() -> None:
    decoder = tiny_decoder(torch.float64).requires_grad_(True)
    tokens_T = torch.arange(12)
    decoder.logits(decoder(tokens_T, tokens_T, causal_attend)).logsumexp(-1).sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_causal_attention_sees_the_past_only() -> None:
    decoder = tiny_decoder(torch.float64)
    tokens_T = torch.arange(12)
    changed_T = tokens_T.clone()
    changed_T[8] = 50
    with torch.no_grad():
        one_TC = decoder(tokens_T, torch.arange(12), causal_attend)
        two_TC = decoder(changed_T, torch.arange(12), causal_attend)
    assert (one_TC[:8] - two_TC[:8]).abs().max() < 1e-12
    assert ((one_TC[8:] - two_TC[8:]).abs().amax(-1) > 1e-6).all()


def test_laws_of_the_tiny_decoder_are_far_from_flat() -> None:
    law_TV = logits(tiny_decoder()).softmax(-1)
    entropy_T = -(law_TV * law_TV.log()).sum(-1)
    assert 0.2 < entropy_T.mean() < 3.5  # a flat law over 64 tokens has 4.16
