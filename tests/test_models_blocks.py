"""The decoder over every kind of blocks: results, launches of a layer, rows independent of others.

Legend: B requests, R rows, T = B * R flat rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import fill_randomly, tiny_decoder
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.errors import Unsupported
from furcate.kernels import (
    attention_join_triton,
    attention_looks_triton,
    tree_attention_triton,
    turn_write_triton,
)
from furcate.kernels import backend_triton as round_kernels
from furcate.kernels.backend import Kernels, Look, kernels_of
from furcate.kernels.tree_attention import Places, Sight, behind
from furcate.kernels.tree_attention_triton import tree_attention as on_device
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models import blocks_triton, norm_triton, product_cut, product_triton, row_triton
from furcate.models.blocks import TORCH, Blocks, Stream, blocks_of
from furcate.models.blocks_triton import INVARIANT, TRITON, ByRows
from furcate.models.causal import causal_attend
from furcate.models.decoder import Decoder, Layer
from furcate.models.product_cut import Size, Tile, one_tile
from furcate.models.product_triton import tiled
from furcate.models.weights import places

pytestmark = MARKS

CPU = torch.device("cpu")
PAGE, VOCAB = 16, 40
TABLE_BP = [[3, 1, 7, 9], [2, 5, 6, 4]]


def wide_decoder(**changes: Any) -> Decoder:
    """Two layers, and heads as wide as the kernels want them."""
    spec = replace(tiny_decoder(vocab=VOCAB).spec, head_dim=16, **changes)
    decoder = Decoder(spec, torch.float32, CPU)
    fill_randomly(places(decoder), 0)
    return decoder.requires_grad_(False).to(DEVICE)


def text_of(seed: int, length: int = 60) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=rng).tolist()


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, stop) of a text, scored as a chain behind those before it."""

    request: int
    start: int
    stop: int


class Scorer:
    """A decoder with a cache; `score` writes the keys of each stretch and gives its logits."""

    def __init__(self, decoder: Decoder, blocks: Blocks, kernels: Kernels) -> None:
        spec = decoder.spec
        self.decoder = decoder.on(blocks)
        shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, 10, PAGE)
        self.cache = PagedCache(shape, decoder.dtype, decoder.device, kernels)
        self.texts = [text_of(seed) for seed in range(2)]

    @torch.inference_mode()
    def score(self, *stretches: Stretch, columns: int = 0) -> list[Tensor]:
        """One pass; [rows, V] of each stretch. It looks at `columns`, or at as many as needed."""
        live_B = torch.tensor([s.stop - s.start for s in stretches])
        length_B = torch.tensor([s.start for s in stretches])
        r_R = torch.arange(int(live_B.max()))
        live_BR = r_R < live_B[:, None]
        end_BR = torch.where(live_BR, live_B[:, None], r_R + 1)
        at_BR = length_B[:, None] + torch.where(live_BR, r_R, 0)
        tokens_BR = torch.tensor([self.texts[s.request] for s in stretches]).gather(1, at_BR)
        where = Places(
            torch.tensor([TABLE_BP[s.request] for s in stretches]).to(DEVICE),
            length_B.to(DEVICE),
            PAGE,
            columns or int((length_B + live_B).max()),
        )
        sight = behind(where, end_BR.to(DEVICE), live_B.to(DEVICE))
        attend = self.cache.attend(sight, self.decoder.spec.num_heads)
        hidden_TC = self.decoder(tokens_BR.flatten().to(DEVICE), at_BR.flatten().to(DEVICE), attend)
        logits_BRV = self.decoder.logits(hidden_TC).view(*at_BR.shape, -1)
        return [logits_BRV[b, :live] for b, live in enumerate(live_B.tolist())]


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"tied_embeddings": False}], ids=str)
@pytest.mark.parametrize("blocks", [TRITON, INVARIANT], ids=["fused", "invariant"])
def test_the_decoder_says_the_same_over_other_blocks(
    blocks: Blocks, changes: dict[str, Any]
) -> None:
    decoder = wide_decoder(**changes)
    tokens_T = torch.tensor(text_of(1, 7), device=DEVICE)
    at_T = torch.arange(7, device=DEVICE)
    with torch.inference_mode():
        told = decoder.on(TORCH).states(tokens_T, at_T, causal_attend, (0, 1, 2))
        heard = decoder.on(blocks).states(tokens_T, at_T, causal_attend, (0, 1, 2))
        scores = [
            decoder.on(TORCH).logits(told.last_TC),
            decoder.on(blocks).logits(heard.last_TC),
        ]
    torch.testing.assert_close(heard.last_TC, told.last_TC, atol=3e-5, rtol=0)
    torch.testing.assert_close(heard.features_TF, told.features_TF, atol=3e-5, rtol=0)
    torch.testing.assert_close(*scores, atol=2e-4, rtol=0)
    assert (heard.features_TF[:, :32] - told.features_TF[:, 32:64]).abs().max() > 0.1


def test_the_same_weights_serve_two_kinds_of_blocks() -> None:
    decoder = wide_decoder()
    other = decoder.on(INVARIANT)
    assert decoder.on(decoder.blocks) is decoder and other is not decoder
    assert other.embedding is decoder.embedding and other.layers is decoder.layers
    assert other.blocks is INVARIANT and decoder.blocks is not INVARIANT


# -- launches ------------------------------------------------------------------------------------


class Launches:
    """Counts the launches of kernels by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        for module, name in (
            (product_triton, "_product"),
            (row_triton, "_row"),
            (norm_triton, "_add_norm"),
            (turn_write_triton, "_turn_write"),
            (tree_attention_triton, "_attend"),
            (attention_join_triton, "_join"),
        ):
            patch.setattr(module, name, _Counted(module, name, self.count))


class _Counted:
    def __init__(self, module: ModuleType, name: str, count: Counter[str]) -> None:
        self._kernel, self._name, self._count = getattr(module, name), name, count

    def __getitem__(self, grid: Any) -> Any:
        self._count[self._name] += 1
        return self._kernel[grid]


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of torch's own operations that compute something, and so are launches as well."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        allocates = "empty" in name or name.startswith("fill_")  # which is poison
        if not (allocates or _is_view(out, args)):
            self.names.append(name)
        return out


def _is_view(out: Any, args: Any) -> bool:
    if not (isinstance(out, Tensor) and args and isinstance(args[0], Tensor)) or out is args[0]:
        return False
    return out.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("blocks", "kernels", "rows", "product", "joins"),
    [
        (TRITON, round_kernels.TRITON, 1, "_row", 0),
        (TRITON, round_kernels.TRITON, 20, "_product", 0),
        (INVARIANT, round_kernels.INVARIANT, 20, "_product", 1),
    ],
    ids=["plain", "tree", "invariant"],
)
def test_a_layer_takes_at_most_seven_launches(
    blocks: Blocks,
    kernels: Kernels,
    rows: int,
    product: str,
    joins: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = 2
    launches = Launches(monkeypatch)
    Scorer(wide_decoder(), blocks, kernels).score(Stretch(0, 0, rows))
    found = launches.count
    assert found.pop(product) == 4 * layers + 1, "of each layer, and the scores"
    assert found.pop("_add_norm") == 1, "the last norm; the others are parts of products"
    assert found.pop("_join", 0) == joins * layers
    assert found.pop("_turn_write", 0) == (layers if rows > 1 else 0), "else a part of `_attend`"
    assert found == {"_attend": layers}


@pytest.mark.parametrize("blocks", [TRITON, INVARIANT], ids=["fused", "invariant"])
def test_nothing_else_runs_between_the_kernels_of_a_layer(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer more costs no operation of torch's."""
    if DEVICE.type == "cpu":  # the interpreter copies its arguments by torch's own operations
        monkeypatch.setattr(product_triton, "_product", _Nothing())
        monkeypatch.setattr(turn_write_triton, "_turn_write", _Nothing())
        monkeypatch.setattr(tree_attention_triton, "_attend", _Nothing())
        monkeypatch.setattr(attention_join_triton, "_join", _Nothing())
        monkeypatch.setattr(norm_triton, "_add_norm", _Nothing())
    kernels = round_kernels.INVARIANT if blocks is INVARIANT else round_kernels.TRITON
    counted = []
    for layers in (1, 3):
        decoder = wide_decoder(num_layers=layers, rope_layers=(True,) * layers)
        scorer = Scorer(decoder, blocks, kernels)
        with Operations() as seen:
            scorer.score(Stretch(0, 0, 3))
        counted.append(Counter(seen.names))
    assert counted[0] == counted[1] and counted[0], "embedding, angles and the like"


class _Nothing:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


class Named:
    """Blocks that note who was asked."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard

    def __getattr__(self, block: str) -> Any:
        self._heard.append(self._name)
        return getattr(TORCH, block)


def test_many_rows_and_gradients_go_to_the_products_of_torch() -> None:
    heard: list[str] = []
    by_rows = ByRows(Named("few", heard), Named("many", heard), most=4)  # type: ignore[arg-type]
    decoder = wide_decoder().on(by_rows)

    def asked(rows: int) -> set[str]:
        heard.clear()
        tokens_T = torch.arange(rows, device=DEVICE)
        decoder.logits(decoder(tokens_T, tokens_T, causal_attend))
        assert len(heard) == 4 * 2 + 2, "blocks of the layers, the last norm, the scores"
        return set(heard)

    with torch.inference_mode():
        assert [asked(rows) for rows in (1, 4, 5)] == [{"few"}, {"few"}, {"many"}]
    assert asked(1) == {"many"}
    assert asked(5) == {"many"}


def test_a_compiler_sees_through_the_choice_and_takes_the_products_of_torch() -> None:
    """A head in training is compiled as one graph."""
    nothing: Any = None  # a compiler that took it would fail: there are no blocks in it
    decoder = wide_decoder().on(ByRows(nothing, TORCH, most=64))
    layer, tokens_T = decoder.layers[0], torch.arange(5, device=DEVICE)
    by, x_TC = decoder.rope(tokens_T), decoder.embed(tokens_T)
    fused = torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        found = fused(Stream(x_TC), by, causal_attend, decoder.blocks).whole()
        wanted = layer(Stream(x_TC), by, causal_attend, TORCH).whole()
    # A GPU's library may add up a product in another order when the layer is compiled, so the two
    # are equal within rounding only; that torch's products were taken is told by there being none
    # else.
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_gradients_flow_through_the_blocks_of_a_gpu() -> None:
    decoder = wide_decoder().requires_grad_(True)
    tokens_T = torch.arange(6, device=DEVICE)
    slopes = []
    for blocks in (TORCH, TRITON):
        on = decoder.on(blocks)
        loss = on.logits(on(tokens_T, tokens_T, causal_attend)).logsumexp(-1).sum()
        slopes.append(torch.autograd.grad(loss, [*decoder.parameters()]))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
        assert one.abs().max() > 0


# -- one row by itself, in a chain, in a batch ---------------------------------------------------


STOP = 19  # two splits, and a border of pages


@pytest.fixture
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_looks_triton, "_CHUNK", 16)
    monkeypatch.setattr(
        attention_looks_triton, "one_tile", lambda *_: tree_attention_triton.Tile(16, 16)
    )


def one_by_one(scorer: Scorer, stop: int = STOP) -> Tensor:
    """Logits of the first request's tokens, every one scored by itself."""
    return torch.cat([scorer.score(Stretch(0, n, n + 1))[0] for n in range(stop)])


@pytest.mark.usefixtures("_short_splits")
def test_a_row_has_the_same_bits_alone_in_a_chain_and_in_a_batch() -> None:
    decoder = wide_decoder()
    alone = one_by_one(Scorer(decoder, INVARIANT, round_kernels.INVARIANT))

    def scorer() -> Scorer:
        return Scorer(decoder, INVARIANT, round_kernels.INVARIANT)

    chained = scorer().score(Stretch(0, 0, STOP))[0]
    assert torch.equal(chained, alone)

    chunked = scorer()
    parts = [chunked.score(Stretch(0, a, b))[0] for a, b in ((0, 7), (7, 17), (17, STOP))]
    assert torch.equal(torch.cat(parts), alone)

    batched = scorer()
    batched.score(Stretch(1, 0, 50))
    steps = ((0, 5), (5, 17), (17, STOP))
    both = [batched.score(Stretch(1, 50 + a // 8, 53 + a // 8), Stretch(0, a, b)) for a, b in steps]
    assert torch.equal(torch.cat([mine for _, mine in both]), alone)

    wide = scorer()
    parts = [wide.score(Stretch(0, a, b), columns=64)[0] for a, b in ((0, 14), (14, STOP))]
    assert torch.equal(torch.cat(parts), alone)


def test_norms_of_heads_treat_every_row_by_itself_too() -> None:
    decoder = wide_decoder(qk_norm=True)
    alone = one_by_one(Scorer(decoder, INVARIANT, round_kernels.INVARIANT), 5)
    chained = Scorer(decoder, INVARIANT, round_kernels.INVARIANT).score(Stretch(0, 0, 5))[0]
    assert torch.equal(chained, alone)


def _careless_products(size: Size) -> Tile:
    return replace(one_tile(size), inputs=16 if size.rows > 1 else 32)


def _careless_attention(sight: Sight, group: int, dtype: torch.dtype) -> Look:
    tile = tree_attention_triton.Tile(16, 16 if sight.rows > 1 else 32)
    return lambda q_THD, keys: on_device(q_THD, keys, sight, tile=tile, chunk=32)


@pytest.mark.parametrize("at_fault", ["nothing", "products", "attention"])
def test_rows_that_depend_on_others_are_noticed(at_fault: str) -> None:
    blocks, kernels = INVARIANT, round_kernels.INVARIANT
    if at_fault == "products":
        blocks = blocks_triton.Fused(tiled(_careless_products))
    if at_fault == "attention":
        kernels = replace(kernels, look=_careless_attention)
    decoder = wide_decoder()
    stepped = Scorer(decoder, blocks, kernels)
    stepped.score(Stretch(0, 0, 29))
    alone_1V = stepped.score(Stretch(0, 29, 30))[0]
    chained_TV = Scorer(decoder, blocks, kernels).score(Stretch(0, 0, 30))[0]
    assert torch.equal(chained_TV[-1:], alone_1V) == (at_fault == "nothing")


# -- who gets what -------------------------------------------------------------------------------


def test_a_cpu_refuses_what_it_cannot_hold() -> None:
    assert blocks_of(CPU, torch.float32) is TORCH
    with pytest.raises(Unsupported, match="number of rows") as caught:
        blocks_of(CPU, torch.float32, batch_invariant=True)
    assert caught.value.field == "batch_invariant"
    with pytest.raises(Unsupported, match="number of rows") as caught:
        kernels_of(CPU, batch_invariant=True)
    assert caught.value.field == "batch_invariant"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "why"),
    [(torch.float64, 16, "float64"), (torch.float32, 24, "this is 24")],
)
def test_kernels_that_promise_it_never_fall_back(
    dtype: torch.dtype, head_dim: int, why: str
) -> None:
    with pytest.raises(Unsupported, match=why) as caught:
        round_kernels.INVARIANT.fitting(dtype, head_dim)
    assert caught.value.field == "batch_invariant"
    assert round_kernels.INVARIANT.fitting(torch.float32, 16) is round_kernels.INVARIANT


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_both_records_are_those_of_the_device(dtype: torch.dtype) -> None:
    assert blocks_of(DEVICE, dtype) is TRITON
    assert blocks_of(DEVICE, dtype, batch_invariant=True) is INVARIANT
    assert blocks_of(DEVICE, torch.float64) is TORCH
    decoder = wide_decoder().to(dtype)
    scorer = Scorer(decoder, INVARIANT, round_kernels.INVARIANT)
    alone = one_by_one(scorer)
    fresh = Scorer(decoder, INVARIANT, round_kernels.INVARIANT)
    assert torch.equal(fresh.score(Stretch(0, 0, STOP))[0], alone)


@torch.inference_mode()
def test_a_sum_that_a_product_left_over_is_made_once_before_a_fused_one() -> None:
    layer = wide_decoder().layers[0]
    assert isinstance(layer, Layer)
    rng = torch.Generator().manual_seed(2)
    x_TC, more_TC = torch.randn(2, 5, 32, generator=rng).to(DEVICE)
    for block, norm, by in (
        ("norm_linear", layer.attention_norm, layer.attention.qkv),
        ("gate_linear", layer.mlp_norm, layer.mlp.gate_up),
    ):
        told = getattr(TORCH, block)(Stream(x_TC, more_TC), norm, by)
        heard = getattr(INVARIANT, block)(Stream(x_TC, more_TC), norm, by)
        alone = getattr(INVARIANT, block)(Stream(x_TC), norm, by)
        for one, other in zip(heard, told, strict=True):
            torch.testing.assert_close(one, other, atol=3e-5, rtol=0)
        assert (alone[1] - told[1]).abs().max() > 0.01, "the comparison can fail"


def test_weights_that_torch_multiplies_faster_are_left_to_it_from_some_rows_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_cut, "MEASURED", ())
    heard: list[str] = []
    by_rows = ByRows(Named("few", heard), Named("many", heard), most=64)  # type: ignore[arg-type]

    def asked(rows: int, outputs: int, inputs: int) -> str:
        weight = torch.empty((outputs, inputs), dtype=torch.bfloat16, device="meta")
        by = SimpleNamespace(weight=weight, bias=None, packed=None)
        with torch.inference_mode():
            by_rows.linear(torch.empty((rows, inputs), dtype=torch.bfloat16, device="meta"), by)
        return heard[-1]

    assert [asked(rows, 4096, 14336) for rows in (7, 8, 64)] == ["few", "many", "many"]
    assert [asked(rows, 28672, 4096) for rows in (8, 32, 33)] == ["few", "few", "many"]
    assert asked(64, 576, 1536) == "few", "a small one"
    assert asked(64, 128256, 4096) == "few", "the scores"
