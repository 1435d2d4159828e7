"""The fused product against its torch reference in float64; unwritten memory is NaN.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.models import product_cut, product_join_triton
from furcate.models.blocks import TORCH, Stream
from furcate.models.blocks_triton import Fused
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm
from furcate.models.product_cut import MEASURED, Cut, Size, Tile, fitting_tile, one_tile
from furcate.models.product_join_triton import tickets
from furcate.models.product_triton import Multiply, product, tiled
from furcate.models.row_triton import row_product

pytestmark = MARKS

NAN = float("nan")
# about three times the worst of 60 random products of unit variance (float32 3e-6, float16 4e-3;
# bfloat16 has eight times float16's rounding); the judge reads the same rounded inputs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1.2e-2, torch.bfloat16: 1e-1}
# the interpreter multiplies bfloat16 as the integers that hold its bits
DTYPES = [d for d in TOLERANCE if d != torch.bfloat16 or DEVICE.type == "cuda"]
SIZES = [(1, 16, 16), (5, 48, 21), (16, 33, 40), (64, 40, 90), (7, 300, 18)]
WAYS = {"fitting": tiled(fitting_tile), "one": tiled(one_tile), "row": row_product}
SMOL, EIGHT = (576, 1536, 49152), (4096, 14336, 128256)  # hidden and inner size, vocabulary


@dataclass
class Case:
    """A product of unit variance, and all that can stand around it."""

    x_TI: Tensor
    by: Linear
    norm: RmsNorm
    add_TO: Tensor  # for ungated products

    def to(self, dtype: torch.dtype, device: torch.device) -> Case:
        """The same numbers elsewhere; modules are copies."""
        by = linear_of(self.by.weight, self.by.bias, dtype, device)
        norm = norm_of(self.norm.weight, dtype, device)
        return Case(self.x_TI.to(device, dtype), by, norm, self.add_TO.to(device, dtype))

    def results(self, blocks: object) -> dict[str, Tensor]:
        """Every block of one product."""
        assert isinstance(blocks, Fused | type(TORCH))
        stream = Stream(self.x_TI)
        return {
            "linear": blocks.linear(self.x_TI, self.by),
            "norm_linear": blocks.norm_linear(stream, self.norm, self.by)[1],
            "no_norm": blocks.norm_linear(stream, None, self.by)[1],
            "gate_linear": blocks.gate_linear(stream, self.norm, self.by)[1],
            "linear_add": blocks.linear_add(self.x_TI, self.by, self.add_TO).whole(),
        }


def linear_of(
    weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Linear:
    like = torch.empty(0, dtype=dtype, device=device)
    made = Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, like=like)
    made.requires_grad_(False)
    made.weight.copy_(weight_OI)
    if made.bias is not None and bias_O is not None:
        made.bias.copy_(bias_O)
    return made


def norm_of(weight_C: Tensor, dtype: torch.dtype, device: torch.device) -> RmsNorm:
    like = torch.empty(0, dtype=dtype, device=device)
    made = RmsNorm(len(weight_C), 1e-5, like=like).requires_grad_(False)
    made.weight.copy_(weight_C)
    return made


def random_case(rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> Case:
    """On the device; its numbers are those of `dtype`."""
    rng = torch.Generator().manual_seed(rows + inputs + outputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    weight_OI = (normal(2 * outputs, inputs) / inputs**0.5).to(dtype)
    by = linear_of(weight_OI, normal(2 * outputs) if bias else None, dtype, DEVICE)
    # rows may lie apart, and what lies between them is nobody's
    wide_TI = torch.full((rows, inputs + 3), NAN, dtype=dtype)
    wide_TI[:, :inputs] = 2 * normal(rows, inputs)
    x_TI = wide_TI.to(DEVICE)[:, :inputs]
    norm = norm_of(1 + normal(inputs) / 4, dtype, DEVICE)
    return Case(x_TI, by, norm, normal(rows, 2 * outputs).to(DEVICE))


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest distance; NaN counts as infinite."""
    return float((found.cpu().double() - wanted).abs().nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("way", ["fitting", "one", "row"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_product_is_that_of_the_reference(
    size: tuple[int, int, int], dtype: torch.dtype, bias: bool, way: str
) -> None:
    case = random_case(*((1, *size[1:]) if way == "row" else size), dtype, bias)
    wanted = case.to(torch.float64, torch.device("cpu")).results(TORCH)
    for name, found in case.results(Fused(WAYS[way])).items():
        assert found.dtype == dtype
        assert worst(found, wanted[name]) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("size", [(1, 5000, 9), (1, 4096, 2), (1, 40, 801)], ids=str)
def test_a_row_takes_several_steps_and_several_outputs_a_program(
    size: tuple[int, int, int],
) -> None:
    case = random_case(*size, torch.float32, bias=True)
    wanted = case.to(torch.float64, torch.device("cpu")).results(TORCH)
    for name, found in case.results(Fused(row_product)).items():
        assert worst(found, wanted[name]) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_by_itself_multiplies_the_numbers_that_a_tile_multiplies(dtype: torch.dtype) -> None:
    """A norm rounds alike in both, so that they differ by the order of their sums alone."""
    case = random_case(1, 576, 40, dtype, bias=False)
    row = product_in(case, row_product)
    tile = product_in(case, tiled(fitting_tile))
    assert worst(row.float(), tile.double().cpu()) <= 1e-5


def product_in(case: Case, multiply: Multiply) -> Tensor:
    """The normed product by a weight of few ones, whose sums hardly round."""
    weight_OI = torch.zeros_like(case.by.weight)
    weight_OI[:, :: case.x_TI.shape[1] // 4] = 1.0
    by = linear_of(weight_OI, None, case.x_TI.dtype, DEVICE)
    return multiply(case.x_TI, by, norm=case.norm)


def test_more_rows_than_a_tile_has_take_more_tiles() -> None:
    case = random_case(70, 20, 18, torch.float32, bias=True)
    wanted = case.to(torch.float64, torch.device("cpu")).results(TORCH)
    for name, found in case.results(Fused(tiled(fitting_tile))).items():
        assert worst(found, wanted[name]) <= TOLERANCE[torch.float32], name


def test_the_comparison_can_fail() -> None:
    case = random_case(5, 48, 21, torch.float32, bias=True)
    exact = case.to(torch.float64, torch.device("cpu"))
    exact.by.weight[3] *= 1.001
    wanted = exact.results(TORCH)
    for name, found in case.results(Fused(tiled(fitting_tile))).items():
        assert worst(found, wanted[name]) > 1e-4, name


def test_a_norm_of_float16_does_not_overflow_where_its_result_does_not() -> None:
    case = random_case(3, 32, 16, torch.float16, bias=False)
    case.x_TI[1, 5] = 60000.0
    case.norm.weight[5] = 8.0
    wanted = case.to(torch.float64, torch.device("cpu")).results(TORCH)
    found = case.results(Fused(tiled(fitting_tile)))
    assert worst(found["norm_linear"], wanted["norm_linear"]) <= 2e-2  # of 45, that is float16


def test_what_is_given_stays_as_it_is() -> None:
    case = random_case(5, 48, 21, torch.float32, bias=True)
    kept = [x.clone() for x in (case.x_TI, case.add_TO, case.by.weight)]
    case.results(Fused(tiled(fitting_tile)))
    for now, before in zip((case.x_TI, case.add_TO, case.by.weight), kept, strict=True):
        assert torch.equal(now, before)


def test_a_product_that_should_be_learned_from_is_refused() -> None:
    case = random_case(1, 16, 16, torch.float32, bias=False)
    case.by.requires_grad_(True)
    with pytest.raises(AssertionError, match="no slope"):
        product(case.x_TI, case.by, fitting_tile)


# -- inputs that several programs share ----------------------------------------------------------


def shared(splits: int, inputs: int = 16, **changes: bool) -> Multiply:
    """Steps of so many inputs, by so many programs."""
    return tiled(lambda size: replace(fitting_tile(size), inputs=inputs, splits=splits, **changes))


@pytest.mark.parametrize("apart", [False, True], ids=["norm inside", "norm apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "splits", "step"),
    [((5, 48, 21), 3, 16), ((16, 33, 40), 2, 16), ((70, 40, 9), 8, 16), ((9, 70, 20), 2, 64)],
    ids=["whole", "a short end", "some have nothing to do", "a step each"],
)
def test_programs_that_share_inputs_say_what_the_reference_says(
    size: tuple[int, int, int], splits: int, step: int, dtype: torch.dtype, apart: bool
) -> None:
    case = random_case(*size, dtype, bias=True)
    wanted = case.to(torch.float64, torch.device("cpu")).results(TORCH)
    for name, found in case.results(Fused(shared(splits, step, apart=apart))).items():
        assert found.dtype == dtype
        assert worst(found, wanted[name]) <= TOLERANCE[dtype], name


def test_stretches_are_added_up_in_their_order_and_tickets_are_clear_again() -> None:
    case = random_case(20, 80, 25, torch.float32, bias=False)
    found = product(case.x_TI, case.by, lambda size: _shares(size, 3))
    assert torch.equal(found, product(case.x_TI, case.by, lambda size: _shares(size, 3)))
    added = torch.zeros_like(found)
    for begin in (0, 32, 64):
        part = slice(begin, begin + 32)
        by = linear_of(case.by.weight[:, part], None, torch.float32, DEVICE)
        added += product(case.x_TI[:, part], by, lambda size: _shares(size, 1))
    assert torch.equal(found, added)
    for counts in product_join_triton._TICKETS.values():
        assert not counts.any()


def _shares(size: Size, splits: int) -> Tile:
    return Tile(32, 16, 16, 4, 3, splits)


def test_recordings_need_tickets_that_outlive_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda")

    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(product_join_triton, "_TICKETS", {})
    with pytest.raises(RuntimeError, match="once before it is recorded"):
        tickets(OnGpu(), 3)  # type: ignore[arg-type]
    made = torch.zeros(4)
    product_join_triton._TICKETS[OnGpu.device, 7] = made
    assert tickets(OnGpu(), 3) is made  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1",
    reason="a recording needs torch's pools: without them memory is asked of the driver meanwhile",
)
@pytest.mark.parametrize("cut", [cut for cut in MEASURED if cut.tile.splits > 1], ids=str)
def test_recordings_of_shared_products_say_the_same_whoever_comes_last(cut: Cut) -> None:
    case = random_case(cut.rows[1], cut.inputs[0], cut.outputs[0] // 2, torch.bfloat16, bias=True)

    def multiply() -> Tensor:
        return product(case.x_TI, case.by, lambda _: cut.tile)

    wanted = multiply()
    exact = case.to(torch.float64, torch.device("cpu")).results(TORCH)["linear"]
    assert worst(wanted, exact) <= TOLERANCE[torch.bfloat16]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = multiply()
    for _ in range(200):
        found.fill_(NAN)
        graph.replay()
        assert torch.equal(found, wanted)


# -- one row by itself, and among others --------------------------------------------------------


def rows_of(case: Case, rows: list[int]) -> Case:
    return replace(case, x_TI=case.x_TI[rows], add_TO=case.add_TO[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bit_for_bit_among_any_others(dtype: torch.dtype) -> None:
    case = random_case(70, 300, 40, dtype, bias=True)
    whole = case.results(Fused(tiled(one_tile)))
    for rows in ([0], [69], [33], [5, 40, 69], list(range(1, 60)), list(range(69, -1, -1))):
        for name, found in rows_of(case, rows).results(Fused(tiled(one_tile))).items():
            assert torch.equal(found, whole[name][rows]), (name, rows)


def test_another_order_of_sums_is_noticed() -> None:
    """In every block: the same products, summed from the other end."""
    case = random_case(9, 300, 40, torch.float32, bias=True)
    by = linear_of(case.by.weight.flip(1), case.by.bias, torch.float32, DEVICE)
    norm = norm_of(case.norm.weight.flip(0), torch.float32, DEVICE)
    back = replace(case, x_TI=case.x_TI.flip(1), by=by, norm=norm)
    there = case.results(Fused(tiled(one_tile)))
    for name, found in back.results(Fused(tiled(one_tile))).items():
        assert not torch.equal(found, there[name]), name
        assert worst(found, there[name].cpu().double()) <= 2 * TOLERANCE[torch.float32], name


def test_steps_that_depend_on_the_number_of_rows_are_noticed() -> None:
    """A GPU adds up float32 products one by one whatever the step, but a norm's squares by lane."""

    def careless(size: Size) -> Tile:
        return replace(one_tile(size), inputs=16 if size.rows > 1 else 64)

    case = random_case(9, 3000, 20, torch.float32, bias=True)
    # squares of less than half a unit in the last place of 1 vanish in the lane that begins with 1:
    # 187 of them in steps of 16, and 46 in steps of 64
    case.x_TI[3] = 0.9**0.5 * 2.0**-12
    case.x_TI[3, 0] = 1.0
    whole = case.results(Fused(tiled(careless)))
    alone = rows_of(case, [3]).results(Fused(tiled(careless)))
    for name in ("norm_linear", "gate_linear"):
        assert not torch.equal(alone[name], whole[name][[3]]), name


# -- how products are cut by rule ----------------------------------------------------------------


def products(sizes: tuple[int, int, int]) -> list[tuple[int, int]]:
    """(outputs, inputs) of a model's products."""
    hidden, inner, vocab = sizes
    qkv = hidden * 5 // 3 if hidden == SMOL[0] else hidden * 3 // 2
    return [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner), (vocab, hidden)]


@pytest.fixture
def _no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cut, "MEASURED", ())


@pytest.mark.usefixtures("_no_table")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [SMOL, EIGHT], ids=["small", "large"])
def test_only_the_rows_of_a_tile_depend_on_the_rows(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for outputs, inputs in products(sizes):
        tiles = [fitting_tile(Size(t, outputs, inputs, dtype)) for t in range(1, 65)]
        assert len({(tile.outputs, tile.inputs) for tile in tiles}) == 1
        assert [tile.rows for tile in tiles] == [16] * 16 + [32] * 16 + [64] * 32
        assert len({one_tile(Size(t, outputs, inputs, dtype)) for t in (1, 7, 512)}) == 1


@pytest.mark.usefixtures("_no_table")
@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("sizes", [SMOL, EIGHT], ids=["small", "large"])
def test_tiles_fill_a_device_and_fit_into_it(sizes: tuple[int, int, int], rows: int) -> None:
    for outputs, inputs in products(sizes):
        size = Size(rows, outputs, inputs, torch.bfloat16)
        for tile in (fitting_tile(size), one_tile(size)):
            programs = outputs // tile.outputs
            assert programs >= 96 or tile.outputs == 16, "a narrow product is cut as fine as can be"
            assert programs < 256 or tile.outputs == (64 if inputs < 2048 else 128)
            staged = tile.stages * tile.inputs * (tile.outputs + tile.rows) * 2
            assert staged <= 160 * 1024, "a processor has 227 KiB"
            assert tile.stages >= 3
