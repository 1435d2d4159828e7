"""Memory on a GPU, counted without one: what is stated is what is allocated, and what fits fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import tiny_model_in
from small_models import tiny_decoder
from tiny_engine import VOCAB, decoder, tokenizer
from tiny_heads import KINDS, network

from furcate.cli.fallbacks import fallbacks
from furcate.cli.options import TargetFlags
from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.footprint import Footprint, storages
from furcate.engine import build as building
from furcate.engine.build import Built, build, device_of, load
from furcate.engine.engine import Engine
from furcate.engine.memory import Demand, Device, Running, Sizes, demand_of, named, pages_for
from furcate.engine.report import backend_json
from furcate.engine.state import StateShape
from furcate.errors import BadRequest, Unsupported, UserError
from furcate.heads.store import save_head
from furcate.kv.cache import CacheShape
from furcate.models import product_cut
from furcate.models.product_cut import Cut, Tile

GIB = 2**30
CONTEXT = 256
NETWORKS = (*KINDS, "model", "ngram+eagle3")


def drafter_named(which: str, folder: Path) -> str | Path:
    """The name or path that makes a drafter of this kind."""
    if which in ("off", "ngram"):
        return which
    if which == "model":
        return tiny_model_in(folder)
    kind = which.removeprefix("ngram+")
    frequent_N, own = torch.arange(VOCAB), tokenizer().fingerprint()
    save_head(folder / kind, network(kind), frequent_N=frequent_N, fingerprint=own, provenance={})
    return folder / kind if kind == which else f"ngram+{folder / kind}"


def built_with(
    drafter: str | Path, device: Device, patch: pytest.MonkeyPatch, **options: Any
) -> Built:
    """An engine of the tiny target that takes the CPU for a GPU with so much memory."""
    patch.setattr(building, "device_memory", lambda _: device)
    asked = EngineOptions(**{"graphs": False, "max_context": CONTEXT, "max_batch": 2, **options})
    return build(decoder(), tokenizer(), drafter, asked, DraftOptions(num_draft_tokens=7))


def pools(drafter: Any) -> int:
    """Bytes of a drafter's pools."""
    inner = getattr(drafter, "network", drafter)
    owner = drafter if hasattr(inner, "kv") else inner
    cache = getattr(owner, "cache", None)
    states = owner.states if cache is None else cache.states
    keys = [] if cache is None else [cache.keys.k_LSKD, cache.keys.v_LSKD]
    return sum(pool.nbytes for pool in (*keys, states.state_SC))


@pytest.mark.parametrize("which", NETWORKS)
def test_the_pools_that_are_stated_are_those_that_are_made(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_named(which, tmp_path)
    built = built_with(drafter, Device(4 * GIB, 4 * GIB), monkeypatch, kv_tokens=1000)
    cache, stated = built.round.target.cache, built.memory
    assert stated is not None
    assert stated.kv == cache.k_LSKD.nbytes + cache.v_LSKD.nbytes
    assert stated.draft_kv == pools(built.round.drafter) > 0
    assert stated.weights == sum(storages(decoder()).values())
    own = heads_own(which, built.round.drafter)
    assert stated.draft_weights == sum(own.values()), "what a head shares counts once"
    assert stated.total == sum(v for k, v in stated.as_json().items() if k != "total")


def heads_own(which: str, drafter: Any) -> dict[int, int]:
    """Storages of a drafter's network that are not the target's."""
    if which == "model":
        return storages(drafter.network.decoder)
    parts = dict(network(which.removeprefix("ngram+")).named_parameters())
    own = {x.data_ptr(): x.nbytes for x in parts.values()}
    return own if which == "medusa" else own | {-1: decoder().rope.freq_F.nbytes}


SPEC = replace(
    tiny_decoder().spec,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_layers=(True,) * 30,
)
SIZES = Sizes(StateShape(8, 8192, 8, 520, 100, 49152), rows=64, chunk=256, features=3 * 576)


def demand(recorded: bool = True, kernels: str = "triton", sizes: Sizes = SIZES) -> Demand:
    """A model of 135 million weights in bfloat16."""
    return demand_of(
        SPEC,
        {1: 269_000_000},
        (CacheShape(30, 3, 64, 1, 16), torch.bfloat16),
        Footprint(slot=1536, scratch=10**6, work=10**7, weights={1: 7, 2: 10**7}),
        sizes,
        Running(kernels, recorded),
    )


def test_a_token_costs_its_keys_and_what_the_drafter_keeps() -> None:
    asked = demand()
    more, less = asked.with_pages(101), asked.with_pages(100)
    assert more.kv - less.kv == 16 * 2 * 30 * 3 * 64 * 2
    assert more.draft_kv - less.draft_kv == 16 * 1536
    assert less.draft_weights == 10**7, "the storage that is the target's is not counted again"
    assert replace(more, kv=less.kv, draft_kv=less.draft_kv) == less


def test_what_a_round_works_in_grows_with_its_rows_the_law_and_recordings() -> None:
    base = demand(recorded=False).least
    assert base.graphs == 0 < demand().least.graphs
    assert base.workspace > 512 * 49152 * (2 + 4), "the logits of all rows are among it"
    wide = replace(SIZES, rows=128)
    assert demand(sizes=wide).least.workspace > 1.6 * base.workspace
    assert demand(kernels="torch").least.workspace > 5 * base.workspace
    chunk = replace(SIZES, rows=1, chunk=65536)
    assert demand(sizes=chunk).least.workspace > 65536 * 2 * (3 * 576 + 3 * 1536)


def test_partial_sums_of_products_are_stated_once_and_for_each_copy_of_recordings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_cut, "MEASURED", ())
    before, without = demand().least, demand(kernels="torch").least
    tile = Tile(64, 128, 128, 4, 4, splits=4)
    cut = Cut((9, 64), (4096, 4096), (4096, 16384), tile)
    monkeypatch.setattr(product_cut, "MEASURED", (cut,))
    after, room = demand().least, cut.most_part_bytes
    assert room > 2**22
    assert after.workspace == before.workspace + room
    assert after.graphs == before.graphs + 2 * room
    assert demand(kernels="torch").least == without


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("others", [0, 20 * GIB, 60 * GIB])
def test_a_pool_keeps_to_its_share_and_to_what_is_free(share: float, others: int) -> None:
    asked, total = demand(), 80 * GIB
    weights = asked.least.weights + asked.least.draft_weights
    device = Device(total - others - weights, total)
    options = EngineOptions(gpu_memory_utilization=share, max_batch=1000)
    pages = pages_for(options, asked, device, 8192)
    held, one = asked.with_pages(pages).total, asked.with_pages(pages + 1).total
    allowed = min(share * total, share * device.free + weights)
    assert held <= allowed < one


def test_there_is_use_for_no_more_than_all_requests_at_their_longest() -> None:
    device = Device(80 * GIB, 80 * GIB)
    assert pages_for(EngineOptions(max_batch=2), demand(), device, 8192) == 2 * 8192 // 16
    asked = EngineOptions(max_batch=2, kv_tokens=100_000)
    assert pages_for(asked, demand(), device, 8192) == 100_000 // 16


@pytest.mark.parametrize(
    ("options", "pages", "field", "value"),
    [
        ({"gpu_memory_utilization": 1.0}, 500, "max_context", 8192),
        ({"gpu_memory_utilization": 0.05}, 10_000, "max_context", 8192),
        ({"kv_tokens": 1_000_000}, 10_000, "kv_tokens", 1_000_000),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_says_what_to_lower(
    options: dict[str, Any], pages: int, field: str, value: int
) -> None:
    asked = demand()
    size = asked.with_pages(pages).total
    with pytest.raises(BadRequest) as caught:
        pages_for(EngineOptions(**options), asked, Device(size, size), 8192)
    assert (caught.value.field, caught.value.value) == (field, value)
    for word in ("lower it", "max_batch", "gpu_memory_utilization is", "GiB"):
        assert word in str(caught.value)


def test_the_most_that_fits_is_taken_and_one_token_more_is_not() -> None:
    asked, device = demand(), Device(8 * GIB, 8 * GIB)
    room = asked.room(device, 0.9)
    assert pages_for(EngineOptions(kv_tokens=room), asked, device, 8192) == room // 16
    with pytest.raises(BadRequest):
        pages_for(EngineOptions(kv_tokens=room + 1), asked, device, 8192)


def test_an_engine_takes_what_room_there_is_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = built_with("ngram", Device(4 * GIB, 4 * GIB), monkeypatch, max_batch=4)
    whole = roomy.memory
    assert whole is not None
    few = replace(whole, kv=whole.kv // 2)  # two requests at their longest, and not four
    tight = Device(few.total - few.weights, few.total)
    options = {"max_batch": 4, "gpu_memory_utilization": 1.0}
    built = built_with("ngram", tight, monkeypatch, **options)
    assert built.memory is not None
    assert built.memory.total <= tight.total
    pages = [parts.round.target.cache.shape.pages for parts in (built, roomy)]
    assert 0.4 < pages[0] / pages[1] < 0.5
    with Engine(built) as engine:
        assert engine.backend()["memory"] == built.memory.as_json()
        output = engine.generate("a", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4


def test_a_cpu_states_nothing() -> None:
    built = build(decoder(), tokenizer(), "off", EngineOptions(), DraftOptions())
    assert built.memory is None and backend_json(built)["memory"] is None


def test_a_share_of_a_gpu_is_refused_on_a_cpu() -> None:
    options = EngineOptions(gpu_memory_utilization=0.5)
    with pytest.raises(Unsupported, match="gpu_memory_utilization"):
        build(decoder(), tokenizer(), "off", options, DraftOptions())


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "0.5", True])
def test_a_share_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        EngineOptions(gpu_memory_utilization=share)
    assert caught.value.field == "gpu_memory_utilization"


def test_two_engines_side_by_side_share_what_the_weights_leave() -> None:
    asked, total = demand(), 80 * GIB
    weights = asked.least.weights + asked.least.draft_weights
    device = Device(total - weights, total)
    flags = TargetFlags(gpu_memory_utilization=0.8)
    alone, twin = (
        flags.engine_options(max_batch=1000),
        flags.engine_options(engines=2, max_batch=1000),
    )
    pages = [pages_for(options, asked, device, 8192) for options in (alone, twin)]
    held = [asked.with_pages(number).total - weights for number in pages]
    assert held[1] == pytest.approx(held[0] / 2, rel=1e-3)
    both = weights + 2 * held[1]
    assert 0.79 * total < both <= 0.8 * total


def test_weights_above_half_the_share_leave_room_for_two_engines() -> None:
    asked = demand()
    heavy = replace(asked, least=replace(asked.least, weights=40 * GIB, draft_weights=0))
    assert heavy.room(Device(24 * GIB, 64 * GIB), 0.9, 2) > 8192
    assert heavy.room(Device(24 * GIB, 64 * GIB), 0.45) < 0


def test_a_share_above_1_is_refused_for_two_engines_too() -> None:
    with pytest.raises(BadRequest, match="gpu_memory_utilization"):
        TargetFlags(gpu_memory_utilization=1.9).engine_options(engines=2)


DRIVERS = "CUDA error: out of memory"
LIBRARYS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("told", [DRIVERS, LIBRARYS])
def test_the_drivers_and_the_librarys_lack_of_memory_say_what_to_lower(told: str) -> None:
    with pytest.raises(BadRequest, match="lower it, kv_tokens"), named("a round was played"):
        raise RuntimeError(told)


def test_another_fault_of_the_device_is_not_called_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), named("a round was played"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["loading", "building", "a round"])
def test_running_out_of_memory_is_an_error_that_says_what_to_lower(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    folder = tiny_model_in(tmp_path / "model")
    if where == "a round":
        engine = Engine(load(folder, "off", EngineOptions(), DraftOptions()))
        monkeypatch.setattr(engine.built.player, "launch", full)
        with engine, pytest.raises(BadRequest) as caught:
            engine.generate("a", SamplingParams(max_tokens=4))
    else:
        name = "load_decoder" if where == "loading" else "PagedCache"
        monkeypatch.setattr(building, name, full)
        with pytest.raises(BadRequest) as caught:
            load(folder, "off", EngineOptions(), DraftOptions())
    for word in ("out of memory", "kv_tokens", "max_batch", "gpu_memory_utilization"):
        assert word in str(caught.value)


def test_other_faults_keep_their_name() -> None:
    with pytest.raises(RuntimeError, match="of another kind"), named("nothing was done"):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize(
    ("there", "asked", "words"),
    [
        ({"is_available": False}, "cuda", "no CUDA device"),
        ({"device_count": 1}, "cuda:1", "one CUDA device"),
        ({"device_count": 2}, "cuda:2", "2 CUDA devices"),
        ({"get_device_capability": (7, 5)}, "cuda", "need compute capability 8.0.* has 7.5"),
        ({"get_device_capability": (7, 5)}, "auto", "need compute capability 8.0.* has 7.5"),
    ],
    ids=str,
)
def test_a_gpu_that_will_not_do_is_refused_before_anything_is_loaded(
    there: dict[str, Any], asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, **there)
    with pytest.raises(UserError, match=words) as caught:
        device_of(asked)
    assert caught.value.field == "device" and caught.value.value is not None


def test_a_gpu_without_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    assert device_of("auto") == torch.device("cuda")
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="triton"):
        device_of("cuda")


def gpu(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A machine that seems to have one."""
    there = {"is_available": True, "device_count": 1, "get_device_capability": (9, 0), **changes}
    for name, value in there.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_what_an_engine_did_without_is_said_in_lines() -> None:
    wide = {"put_kernels_why": None, "join_kernels_why": None}
    sound = {"kernels_why": None, "draft_kernels_why": None, "graphs": None, **wide}
    assert fallbacks(sound) == []
    graphs = {"recorded": [], "refused": {"1x8 columns=512 noise": "RuntimeError: no"}}
    poor = {"kernels_why": "the head size is 8", "draft_kernels_why": None, "graphs": graphs}
    poor |= wide | {"join_kernels_why": "8 matches are too many"}
    assert fallbacks(poor) == [
        "kernels: torch's own, since the head size is 8",
        "join kernels: torch's own, since 8 matches are too many",
        "not recorded: rounds of 1x8 columns=512 noise, since RuntimeError: no",
    ]


def test_what_is_kept_of_requests_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_with("ngram", Device(4 * GIB, 4 * GIB), monkeypatch, max_batch=3)
    state = built.round.state
    own = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
    proposal = state.proposal
    own += [getattr(proposal, name) for name in proposal.__dataclass_fields__]
    options = 4 * VOCAB * (4 + 1 + 1 + 8)  # bias, allowed, prompt, counts: once asked for
    assert built.memory is not None
    exact = sum(x.nbytes for x in own) + options
    assert exact <= built.memory.state <= 1.1 * exact


@pytest.mark.gpu
def test_an_engine_on_a_gpu_holds_no_more_than_it_states(embedded_model: Path) -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    options = EngineOptions(device="cuda", max_batch=4, max_context=2048)
    with Engine(load(embedded_model, "ngram", options, DraftOptions())) as engine:
        laws = [{}, {"top_p": 0.9, "top_k": 40}, {"presence_penalty": 0.5, "logprobs": True}]
        for law in laws:
            params = SamplingParams(max_tokens=64, ignore_eos=True, seed=1, **law)
            engine.generate(["Count to a hundred. " * n for n in (1, 9, 90)], params)
        stated = engine.backend()["memory"]["total"]
        assert torch.cuda.max_memory_reserved(device) - before <= 1.05 * stated
