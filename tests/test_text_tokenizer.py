"""Tokenizers from folders and GGUF files: the same ids, the same text, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocab import (
    MARKS,
    TOOL,
    id_of,
    tokens,
    write_fallback_folder,
    write_folder,
    write_gguf,
    write_json,
)

from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.gguf_file import read_gguf
from furcate.text.tokenizer import Tokenizer, load_tokenizer

PARTS = st.sampled_from(["hello", " w", "  ", "\n", "7", "é", "<|im_end|>", TOOL, "👩‍👩‍👧", "\t"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(PARTS).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("hf")))


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf"))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_fallback_folder(tmp_path_factory.mktemp("spm")))


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_text_comes_back_from_its_tokens(folder: Tokenizer, text: str) -> None:
    assert folder.decode(folder.encode(text), skip_special=False) == text


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_a_folder_and_a_gguf_file_of_one_vocabulary_agree(
    folder: Tokenizer, from_gguf: Tokenizer, text: str
) -> None:
    assert from_gguf.encode(text) == folder.encode(text)


@given(st.lists(st.integers(0, len(tokens()) + 3)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_decoding_equals_the_tokenizers_library(
    folder: Tokenizer, ids: list[int], skip: bool
) -> None:
    known = folder._backend.decode(ids, skip_special_tokens=skip)
    assert folder.decode(ids, skip_special=skip) == known


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_text_comes_back_from_its_tokens(fallback: Tokenizer, text: str) -> None:
    ids = fallback.encode(text.replace("▁", ""))
    assert fallback.decode(ids) == fallback._backend.decode(ids)
    assert fallback.decode(ids) == text.replace("▁", "")


def test_wrong_bytes_of_a_byte_fallback_leave_their_right_neighbours_alone(
    fallback: Tokenizer,
) -> None:
    byte = {b: id_of(fallback, f"<0x{b:02X}>") for b in (0xC3, 0xA9)}
    assert fallback.decode([byte[0xC3], byte[0xA9], byte[0xC3]]) == "é\ufffd"


def test_the_same_vocabulary_has_the_same_fingerprint(
    folder: Tokenizer, from_gguf: Tokenizer, fallback: Tokenizer
) -> None:
    assert folder.fingerprint() == from_gguf.fingerprint()
    assert folder.fingerprint() != fallback.fingerprint()


def test_two_swapped_tokens_change_the_fingerprint(tmp_path: Path, from_gguf: Tokenizer) -> None:
    swapped = tokens()
    swapped[40], swapped[41] = swapped[41], swapped[40]
    other = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=swapped))
    assert other.fingerprint() != from_gguf.fingerprint()


def test_padding_of_the_matrix_is_no_part_of_the_vocabulary(
    tmp_path: Path, from_gguf: Tokenizer
) -> None:
    kinds = [3] * 3 + [1] * (len(tokens()) - 4) + [4, 5, 5]
    padded = write_gguf(
        tmp_path / "m.gguf", tokens=[*tokens(), "[PAD1]", "[PAD2]"], token_type=kinds
    )
    assert load_tokenizer(padded).fingerprint() == from_gguf.fingerprint()


def test_what_a_tokenizer_says_about_itself(folder: Tokenizer, from_gguf: Tokenizer) -> None:
    for tokenizer in (folder, from_gguf):
        assert tokenizer.vocab_size == len(tokens())
        assert tokenizer.bos_id == 1
        assert tokenizer.special_ids == {0, 1, 2}
        assert tokenizer.has_template
        assert tokenizer.token_text(2) == "<|im_end|>"
        assert tokenizer.token_text(tokens().index("Ġw")) == " w"
        assert tokenizer.token_text(10**6) == ""


def test_a_gguf_file_ends_answers_at_every_known_end_mark(from_gguf: Tokenizer) -> None:
    assert from_gguf.eos_ids == (2, 0)


def test_a_folder_ends_answers_where_its_files_say(folder: Tokenizer, tmp_path: Path) -> None:
    assert folder.eos_ids == (2,)
    write_folder(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [0, 2, 7]})
    assert load_tokenizer(tmp_path).eos_ids == (2, 0, 7)


@pytest.mark.parametrize("adds", [True, False])
def test_the_begin_token_stands_where_the_model_wants_it(tmp_path: Path, adds: bool) -> None:
    from_folder = load_tokenizer(write_folder(tmp_path / "f", add_bos_token=adds))
    from_file = load_tokenizer(write_gguf(tmp_path / "m.gguf", add_bos_token=adds))
    for tokenizer in (from_folder, from_file):
        assert (tokenizer.encode("hello")[0] == 1) == adds
        assert tokenizer.encode("hello", special=False)[0] != 1


def test_llama3_begins_with_bos_where_the_file_does_not_say(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre="llama-bpe", add_bos_token=None)
    assert load_tokenizer(path).encode("hello")[0] == 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ab", " c", "1", "2", "3", "4", "'ll", "  \n", " !", "\r\n"]),
        ("gpt-2", ["ab", " c", "1234", "'ll", "  \n", " !", "\r\n"]),
        ("llama-bpe", ["ab", " c", "123", "4", "'ll", "  \n", " !\r\n"]),
        ("qwen2", ["ab", " c", "1", "2", "3", "4", "'ll", "  \n", " !\r\n"]),
        ("default", ["ab", " c", "123", "4", "'", "ll", "  \n ", "!", "\r\n"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_were_trained(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))
    text = "ab c1234'll  \n !\r\n"
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_half_a_surrogate_pair_is_refused(folder: Tokenizer) -> None:
    with pytest.raises(BadRequest) as err:
        folder.encode("ab\ud800")
    assert (err.value.field, err.value.value) == ("prompt", "\ud800")
    assert "character 2" in str(err.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pre": "someday"}, "tokenizer.ggml.pre"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"model": "llama"}, "tokenizer.ggml.model"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(Unsupported) as err:
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **changes))
    assert err.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": [1, 2]},
        {"token_type": [1, 1]},
        {"merges": ["h e", "zz yy"]},
        {"merges": ["he"]},
        {"bos_token_id": 9999},
        {"bos_token_id": "one"},
        {"add_bos_token": True, "bos_token_id": None},
        {"tokens": [*tokens()[:-1], "a"]},
        {"model": None},
    ],
)
def test_a_gguf_file_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadFile) as err:
        load_tokenizer(path)
    assert err.value.field == str(path)


def test_every_cut_of_a_gguf_header_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 600, 7), *range(600, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile):
            read_gguf(path, strings=True)


def test_text_that_is_not_utf8_in_a_gguf_header_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(TOOL.encode(), b"<\xff\xffol>"))
    with pytest.raises(BadFile, match="UTF-8"):
        load_tokenizer(path)


def test_other_versions_of_gguf_are_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(64))
    with pytest.raises(Unsupported) as err:
        load_tokenizer(path)
    assert err.value.value == 1


def test_our_header_reader_agrees_with_the_gguf_library(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    theirs = gguf.GGUFReader(path).fields
    ours = read_gguf(path, strings=True).metadata
    assert set(ours) == {key for key in theirs if not key.startswith("GGUF.")}
    assert all(theirs[key].contents() == value for key, value in ours.items())


def test_a_missing_model_is_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(BadFile) as err:
        load_tokenizer(tmp_path)
    assert err.value.field == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_damaged_tokenizer_json_is_a_bad_file(tmp_path: Path, damage: bytes) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(BadFile) as err:
        load_tokenizer(tmp_path)
    assert err.value.field == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<|nowhere|>"}),
        ("tokenizer_config.json", {"eos_token": 7}),
        ("tokenizer_config.json", {"chat_template": 7}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("tokenizer_config.json", ["not", "an", "object"]),
        ("generation_config.json", {"eos_token_id": "two"}),
        ("generation_config.json", {"eos_token_id": [2, -1]}),
    ],
)
def test_files_that_contradict_tokenizer_json_are_refused(
    tmp_path: Path, name: str, content: object
) -> None:
    write_folder(tmp_path)
    write_json(tmp_path / name, content)
    with pytest.raises(BadFile):
        load_tokenizer(tmp_path)


def test_a_decoder_that_is_not_a_join_of_bytes_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text("utf-8")
    begin = text.index('"decoder"')
    wordpiece = '"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}'
    end = text.index("}", begin) + 1
    (tmp_path / "tokenizer.json").write_text(text[:begin] + wordpiece + text[end:], "utf-8")
    with pytest.raises(Unsupported) as err:
        load_tokenizer(tmp_path)
    assert err.value.value == "WordPiece"


def test_a_chat_template_beside_the_config_comes_first(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    hello = tokenizer.encode("hello", special=False)
    assert tokenizer.chat_ids([{"role": "user", "content": "hello"}]) == hello


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "hello"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, chat_template=named))
    hello = tokenizer.encode("hello", special=False)
    assert tokenizer.chat_ids([{"role": "user", "content": "x"}]) == hello


def test_chat_marks_become_single_tokens(folder: Tokenizer) -> None:
    ids = folder.chat_ids([{"role": "user", "content": "hello"}])
    assert [i for i in ids if i < len(MARKS)] == [1, 2, 1]
    assert ids != folder.chat_ids(
        [{"role": "user", "content": "hello"}], add_generation_prompt=False
    )


def test_a_model_without_a_template_cannot_chat(fallback: Tokenizer) -> None:
    with pytest.raises(BadRequest) as err:
        fallback.chat_ids([{"role": "user", "content": "hello"}])
    assert (err.value.field, fallback.has_template) == ("messages", False)
