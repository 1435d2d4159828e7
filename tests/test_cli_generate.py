"""`furcate generate`: the answer, the comparison, JSON, and every way to ask wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_runs import furcate
from small_models import fill_randomly
from tiny_vocab import tokens

from furcate.engine import compare
from furcate.engine.compare import Parting
from furcate.heads.spec import MtpSpec
from furcate.heads.store import new_head, save_head
from furcate.models.load import load_decoder

Capsys = pytest.CaptureFixture[str]
SHORT = ("--max-tokens", "24", "--ignore-eos")


def test_an_answer_goes_to_standard_output_and_its_figures_do_not(
    capsys: Capsys, tiny_model: Path
) -> None:
    ran = furcate(capsys, "generate", "hello world", "--target", str(tiny_model), *SHORT)
    assert ran.code == 0
    assert len(ran.out) > 10
    assert "24 tokens" in ran.err
    assert "(bonus included)" in ran.err
    assert "tokens/s" not in ran.out


def test_quiet_leaves_the_answer_alone(capsys: Capsys, tiny_model: Path) -> None:
    ran = furcate(capsys, "generate", "hello", "-q", "--target", str(tiny_model), *SHORT)
    assert (ran.code, ran.err.strip()) == (0, "")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_compare_says_identical_and_both_speeds(
    capsys: Capsys, tiny_model: Path, temperature: str
) -> None:
    words = ["--target", str(tiny_model), "--temperature", temperature, "--compare", *SHORT]
    ran = furcate(capsys, "generate", "hello hello hello hello", *words, "--dtype", "float64")
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert "identical to plain decoding: yes" in lines
    assert any(line.startswith("tokens per round (bonus included): ") for line in lines)
    assert any(line.startswith("with drafting: ") for line in lines)
    assert any(line.startswith("plain: ") for line in lines)


def test_json_is_one_object_and_nothing_else(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--compare", "--target", str(tiny_model), *SHORT]
    record = json.loads(furcate(capsys, *words, "--dtype", "float64").out)
    assert record["identical"] is True
    assert record["difference"] is None
    assert len(record["token_ids"]) == record["stats"]["tokens"] == 24
    assert record["finish_reason"] == "length"
    assert record["stats"]["tokens_per_round"] >= 1


def test_a_told_seed_gives_the_same_answer_again(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), "--temperature", "1"]
    first = json.loads(furcate(capsys, *words, *SHORT).out)
    again = furcate(capsys, *words, *SHORT, "--seed", str(first["seed"]), "--drafter", "off")
    assert json.loads(again.out)["token_ids"] == first["token_ids"]


def test_a_prompt_may_come_from_standard_input(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "--json", "--target", str(tiny_model), *SHORT]
    named = json.loads(furcate(capsys, *words, "héllo").out)
    piped = json.loads(furcate(capsys, *words, "-", stdin="héllo".encode()).out)
    assert named["token_ids"] == piped["token_ids"]


def test_raw_leaves_the_chat_template_out(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    chat = json.loads(furcate(capsys, *words).out)["prompt_tokens"]
    raw = json.loads(furcate(capsys, *words, "--raw").out)["prompt_tokens"]
    system = json.loads(furcate(capsys, *words, "--system", "hi").out)["prompt_tokens"]
    assert raw < chat < system


def test_options_of_vllm_and_sglang_are_understood(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    for more in (
        ["--speculative-config", config],
        ["--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens", "4"],
    ):
        record = json.loads(furcate(capsys, *words, *more).out)
        assert record["drafter"] == record["drafter_details"]["kind"] == "ngram"


@pytest.fixture(scope="session")
def tiny_head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random MTP head of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny-head") / "mtp"
    target = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    block = replace(target.spec, num_layers=1, rope_layers=(True,))
    vocab = target.spec.vocab_size
    head = new_head(MtpSpec(block, (target.spec.num_layers,), vocab), target, None)
    fill_randomly(dict(head.named_parameters()), 1)
    save_head(folder, head, frequent_N=torch.arange(vocab), provenance={})
    return folder


TREE = "[[0], [1], [0, 0]]"
GROWN = ["--beta", "1.2", "--sigma", "0.8", "--entropy-children", "2", "--depth", "3"]


@pytest.mark.parametrize(
    ("more", "width"),
    [
        (["--draft-vocab", "50", "--topk", "3"], 3),
        (["--tree", TREE], 2),
        ([*GROWN, "--value-threshold", "0.01", "--entropy-gate", "0.1", "--tree", "dynamic"], 10),
    ],
    ids=["vocabulary", "tree", "grown"],
)
@pytest.mark.parametrize("beside", ["", "ngram+"])
def test_every_way_to_draft_with_a_head_changes_no_token(
    capsys: Capsys, tiny_model: Path, tiny_head: Path, more: list[str], width: int, beside: str
) -> None:
    words = ["generate", "hello", "--json", "--compare", "--target", str(tiny_model), *SHORT]
    words += ["--dtype", "float64", "--drafter", f"{beside}{tiny_head}", "--fixed", *more]
    record = json.loads(furcate(capsys, *words).out)
    assert record["identical"] is True
    assert record["stats"]["drafted"] > 0
    assert record["drafter"] == f"{beside}{tiny_head}"
    details = record["drafter_details"]
    assert details["kind"] == ("hybrid" if beside else "mtp")
    alone = details["network"] if beside else details
    assert (alone["kind"], alone["width"], alone["layers"]) == ("mtp", width, [2])
    assert alone["draft_vocab"] == (50 if "--draft-vocab" in more else len(tokens()))


def test_a_head_may_be_named_as_vllm_and_sglang_do(
    capsys: Capsys, tiny_model: Path, tiny_head: Path
) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    config = {"method": "mtp", "model": str(tiny_head), "num_speculative_tokens": 2}
    path = ["--speculative-draft-model-path", str(tiny_head), "--speculative-num-steps", "2"]
    for more in (
        ["--speculative-config", json.dumps(config)],
        ["--speculative-algorithm", "NEXTN", *path],
        ["--speculative-algorithm", "EAGLE", *path],
    ):
        details = json.loads(furcate(capsys, *words, *more).out)["drafter_details"]
        assert (details["kind"], details["depth"]) == ("mtp", 2)
    for more in (
        ["--speculative-config", json.dumps(config | {"method": "medusa"})],
        ["--speculative-algorithm", "EAGLE3", *path],
        ["--speculative-algorithm", "STANDALONE", *path],
    ):
        ran = furcate(capsys, *words, *more)
        assert ran.code == 2
        assert "is of the kind mtp" in ran.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["hello", "--temperature", "-1"], "temperature"),
        (["hello", "--top-p", "0"], "top_p"),
        (["hello", "--max-tokens", "0"], "max_tokens"),
        (["hello", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["hello", "--seed", "-1"], "seed"),
        (["hello", "--nodes", "9999"], "num_draft_tokens"),
        (["hello", "--dtype", "int3"], "dtype"),
        (["hello", "--device", "abacus"], "device"),
        (["hello", "--stop", ""], "stop"),
        (["hello", "--stop-token-id", "99999"], "stop_token_ids"),
        (["hello", "--allowed-token-id", "-1"], "allowed_token_ids"),
        (["hello", "--logit-bias", "5"], "--logit-bias"),
        (["hello", "--logit-bias", "a=1"], "--logit-bias"),
        (["hello", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias"),
        (["hello", "--logit-bias", "5=nan"], "logit_bias"),
        (["hello", "--logprobs"], "--json"),
        (["hello", "--json", "--top-logprobs", "2"], "top_logprobs"),
        (["hello", "--n", "0"], "n:"),
        (["hello", "--n", "2", "--compare"], "--n"),
        (["hello", "--drafter", ""], "--drafter"),
        (["hello", "--speculative-config", '{"model": ""}'], "model"),
        (["hello", "--drafter", "no-such-drafter", "--nodes", "0"], "no-such-drafter"),
        (["hello", "--drafter", "no-such-drafter"], "no-such-drafter"),
        (["hello", "--target", "no-such-model"], "no-such-model"),
        (["hello", "--target", "/no/such.gguf"], "/no/such.gguf"),
        (["hello", "--max-context", "100000"], "max_context"),
        (["hello", "--raw", "--system", "hi"], "--system"),
        (["hello", "--speculative-config", "{"], "--speculative-config"),
        (["hello", "--speculative-config", "[1]"], "--speculative-config"),
        (["hello", "--speculative-config", '{"method": "eagle3"}'], "eagle3"),
        (["hello", "--speculative-config", '{"model": "ngram"}', "-d", "off"], "drafter"),
        (["hello", "--speculative-algorithm", "NEXTN"], "mtp"),
        (["hello", "--speculative-algorithm", "NEXTN", "-d", "off"], "--drafter"),
        (["hello", "--speculative-token-map", "x"], "--speculative-token-map"),
        (["hello", "--tree", "[[0"], "--tree"),
        (["hello", "--tree", "[[64]]", "-d", "eagle3"], "tree"),
        (["hello", "--tree", "[[0]]"], "tree"),
        (["hello", "--tree", "[[0]]", "--depth", "2"], "fixed ranks"),
        (["hello", "--beta", "0"], "beta"),
        (["hello", "--sigma", "-1"], "sigma"),
        (["hello", "--value-threshold", "1"], "value_threshold"),
        (["hello", "--entropy-gate", "1"], "entropy_gate"),
        (["hello", "--entropy-children", "1"], "entropy_children"),
        (["hello", "--draft-vocab", "9"], "draft_vocab"),
        (["hello", "--speculative-typo", "x"], "--speculative-typo"),
        (["hello", "--speculative-num-steps"], "--speculative-num-steps"),
        (["hello", "--speculative-num-steps", "3", "--depth", "4"], "--depth"),
        (["hello", "--speculative-num-draft-tokens", "4", "-n3"], "--nodes"),
        (["hello", "--no-such-flag"], "--no-such-flag"),
        (["hello", "--max-tokens", "many"], "--max-tokens"),
        ([""], "prompt"),
        (["   "], "prompt"),
        ([], "prompt"),
        (["bad\udcff"], "valid Unicode"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_a_mistake_is_one_line_with_its_name_and_code_2(
    capsys: Capsys, tiny_model: Path, words: list[str], named: str
) -> None:
    target = [] if "--target" in words else ["--target", str(tiny_model)]
    ran = furcate(capsys, "generate", *words, *target)
    assert ran.code == 2
    assert named in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_input_that_is_not_utf8_is_refused(capsys: Capsys, tiny_model: Path) -> None:
    ran = furcate(capsys, "generate", "-", "--target", str(tiny_model), stdin=b"ab\xff")
    assert ran.code == 2
    assert "not UTF-8 at byte 2" in ran.err


def test_a_prompt_beyond_the_context_is_refused(capsys: Capsys, tiny_model: Path) -> None:
    ran = furcate(capsys, "generate", "hello " * 600, "--target", str(tiny_model))
    assert ran.code == 2
    assert "512" in ran.err


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(("tie", "code"), [(True, 0), (False, 1)])
def test_compare_fails_on_a_difference_that_rounding_does_not_explain(
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tie: bool,
    code: int,
    as_json: list[str],
) -> None:
    monkeypatch.setattr(compare, "parting", lambda *_: Parting(3, 1, 2, 0.5, tie))
    words = ["--target", str(tiny_model), "--compare", *SHORT, *as_json]
    ran = furcate(capsys, "generate", "hello", *words)
    assert ran.code == code
    assert ran.err.count("error") == 0
    assert "identical" in ran.out


def test_all_answers_are_printed_and_lie_in_the_json(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--n", "3", "--seed", "4", "--temperature", "1", *SHORT]
    target = ["--target", str(tiny_model), "--dtype", "float64"]
    record = json.loads(furcate(capsys, *words, *target, "--json").out)
    texts = [choice["text"] for choice in record["choices"]]
    assert len(set(texts)) == 3
    assert record["text"] == texts[0]
    ran = furcate(capsys, *words, *target)
    assert ran.code == 0
    for number, text in enumerate(texts, 1):
        assert f"--- answer {number} of 3\n{text}\n" in ran.out


def test_allowed_and_biased_tokens_are_what_is_said(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    ran = furcate(capsys, *words, "--allowed-token-id", "70", "--allowed-token-id", "71")
    assert set(json.loads(ran.out)["token_ids"]) <= {70, 71}
    ran = furcate(capsys, *words, "--logit-bias", "72=100")
    assert set(json.loads(ran.out)["token_ids"]) == {72}
    ran = furcate(capsys, *words, "--logit-bias", "72=100", "--stop-token-id", "72")
    record = json.loads(ran.out)
    assert (record["token_ids"], record["stop_reason"]) == ([72], 72)


def test_a_stop_string_may_stay_in_the_answer(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    words += ["--logit-bias", "70=100"]
    text = json.loads(furcate(capsys, *words).out)["text"]
    cut = json.loads(furcate(capsys, *words, "--stop", text[0]).out)["text"]
    kept = furcate(capsys, *words, "--stop", text[0], "--include-stop-str-in-output").out
    assert cut == ""
    assert json.loads(kept)["text"] == text[0]


def test_logprobs_lie_in_the_json(capsys: Capsys, tiny_model: Path) -> None:
    words = ["generate", "hello", "--json", "--target", str(tiny_model), *SHORT]
    ran = furcate(capsys, *words, "--logprobs", "--top-logprobs", "2")
    record = json.loads(ran.out)
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(entry["logprob"] <= 0 and len(entry["top"]) == 2 for entry in record["logprobs"])
    assert "logprobs" not in json.loads(furcate(capsys, *words).out)
