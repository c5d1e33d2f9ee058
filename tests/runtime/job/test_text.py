from __future__ import annotations

import base64
import json
import threading
import time
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.text import (
    _BYTE_OF,
    MAX_GROWN_BYTES,
    PATIENCE_TOKENS,
    REPLACEMENT,
    ByteText,
    NoText,
    Text,
    TokenizerText,
)

SAMPLES = [
    "def main():\n    return 'naïve café'\n",
    "中文字符 and emoji 👩‍👩‍👧 here",
    "  two  spaces, \t tabs and\r\nlines",
    "Ünïcödé ∑ ∫ √ — “quotes”",
]


def byte_level() -> TokenizerText:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return TokenizerText(tokenizer.to_str().encode())


def byte_fallback() -> TokenizerText:
    """As SentencePiece models have it: `▁` for a space, `<0xE4>` for bytes outside the vocabulary."""
    words = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyz中"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TokenizerText(tokenizer.to_str().encode())


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
KINDS: dict[str, Text] = {"bytes": ByteText(), "byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK}


def streamed(text: Text, prompt: list[int], ids: list[int]) -> list[str]:
    stream = text.stream(prompt)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(
    prompt=st.text(alphabet="ab z中é👩", max_size=12),
    answer=st.text(alphabet="ab z中é👩‍文\u00a0", min_size=1, max_size=20),
)
def test_pieces_make_the_text_and_no_character_is_ever_broken(kind: str, prompt: str, answer: str) -> None:
    text = KINDS[kind]
    before, ids = text.encode("a" + prompt), text.encode("a" + prompt + answer)
    if ids[: len(before)] != before:
        return  # the prompt's last piece joined with the answer: these ids are not a continuation of it
    pieces = streamed(text, before, ids[len(before) :])
    assert "".join(pieces) == answer
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(answer=st.text(alphabet="ab z中é👩文", min_size=1, max_size=20))
def test_each_token_begins_where_its_character_does(kind: str, answer: str) -> None:
    text = KINDS[kind]
    before, ids = text.encode("a"), text.encode("a" + answer)
    stream, spelled = text.stream(before), b""
    for token in ids[len(before) :]:
        stream.push(token)
        assert stream.begins == len(spelled.decode(errors="ignore"))
        spelled += text.spell(token)


@pytest.mark.parametrize("text", [ByteText(), BYTE_LEVEL], ids=["bytes", "byte-level"])
def test_a_token_after_bytes_that_are_no_text_begins_behind_them(text: Text) -> None:
    """They are shown late, with what follows."""
    lead, space = (next(i for i in range(256) if text.spell(i) == byte) for byte in (b"\xe6", b" "))
    stream, begins = text.stream([space]), []
    for token in (lead, lead, space, lead, space):
        stream.push(token)
        begins.append(stream.begins)
    assert begins == [0, 1, 2, 3, 4]


def test_a_character_of_several_tokens_comes_whole_with_its_last() -> None:
    assert streamed(BYTE_FALLBACK, [], BYTE_FALLBACK.encode("文")[1:]) == ["", "", "", "文", ""]
    assert streamed(ByteText(), [], list("é!".encode())) == ["", "é", "!", ""]


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    prompt, whole = BYTE_FALLBACK.encode("ab"), BYTE_FALLBACK.encode("ab cd")
    assert "".join(streamed(BYTE_FALLBACK, prompt, whole[len(prompt) :])) == " cd"


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    ids = list("ok 中".encode())[:-1]
    assert "".join(streamed(ByteText(), [], ids)) == "ok "
    assert "".join(streamed(BYTE_LEVEL, [], BYTE_LEVEL.encode("ok ∑")[:-1])).rstrip() == "ok"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40))
@given(ids=st.lists(st.integers(0, 255), max_size=60))
def test_any_ids_at_all_stream_in_bounded_windows(kind: str, ids: list[int]) -> None:
    stream = KINDS[kind].stream(ids[:5])
    for token in ids * 3:
        stream.push(token)
        window = getattr(stream, "_ids", [])
        assert len(window) <= 24
    stream.finish()


def across_characters() -> TokenizerText:
    """All bytes as tokens, and some of "กก…" (E0 B8 81, again and again) that end inside one."""
    alphabet = sorted(_BYTE_OF, key=_BYTE_OF.__getitem__)
    thai = [alphabet[byte] for byte in "ก".encode()]
    more = [thai[2] + thai[0], thai[2] + thai[0] + thai[1], "".join(thai) + thai[0], thai[0] + thai[1]]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*alphabet, *more])}, unk_token="a"))
    made.decoder = decoders.ByteLevel()
    return TokenizerText(made.to_str().encode())


ACROSS = across_characters()
KO, KAI = list("ก".encode()), [256, 257, 258, 259]  # bytes, and the tokens of more than one


@pytest.mark.parametrize("again", [[KAI[1]], [KAI[0], KO[1]]])
def test_tokens_that_all_end_inside_a_character_lose_none_of_them(again: list[int]) -> None:
    ids = [*KO[:2], *again * 40, KO[2]]
    pieces = streamed(ACROSS, [], ids)
    assert "".join(pieces) == ACROSS._decode(ids) == "ก" * (len("".join(pieces)))
    assert sum(map(bool, pieces)) >= 40, "shown as they come"


@settings(max_examples=examples(100))
@given(ids=st.lists(st.sampled_from([*KO, *KAI, *KAI[1:2] * 40, ord("a")]), max_size=60))
def test_whatever_ends_inside_a_character_the_text_is_that_of_all_tokens(ids: list[int]) -> None:
    """Apart from what is no text: it comes late, or not at all at the end."""
    stream = ACROSS.stream([])
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        assert len(getattr(stream, "_ids", [])) <= 2 * PATIENCE_TOKENS
    text = "".join((*pieces, stream.finish()))
    assert text.replace(REPLACEMENT, "") == ACROSS._decode(ids).replace(REPLACEMENT, "")


def test_other_threads_run_while_a_text_is_read() -> None:
    """The library keeps Python's lock in most of its functions; a peer would stand still for seconds."""
    text = "".join(SAMPLES) * 600

    def wakes() -> int:
        begun, done, found = threading.Event(), threading.Event(), 0

        def read() -> None:
            begun.set()
            BYTE_LEVEL.encode(text)
            done.set()

        thread = threading.Thread(target=read)
        thread.start()
        begun.wait()
        while not done.is_set():
            found += 1
            time.sleep(0.001)
        thread.join()
        return found

    assert median(wakes() for _ in range(5)) > 4


def test_bytes_that_never_become_text_do_not_hold_back_what_follows() -> None:
    high = BYTE_FALLBACK.encode("é")[1:][1]  # a continuation byte alone
    pieces = streamed(BYTE_FALLBACK, [], [high] * 9 + BYTE_FALLBACK.encode("ab")[1:])
    assert "".join(pieces).endswith("ab")


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(JobError, match="--prompt-ids"):
        NoText().encode("hello")
    assert "".join(streamed(NoText(), [1], [2, 3])) == ""


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"version": "1.0"}'])
def test_a_tokenizer_that_is_none_is_one_clear_line(data: bytes) -> None:
    with pytest.raises(JobError, match=r"^the model's tokenizer cannot be read"):
        TokenizerText(data)


@pytest.mark.parametrize("kind", ["byte-level", "bytes"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_tokens_are_spelt_in_the_bytes_of_their_text(kind: str, sample: str) -> None:
    text = KINDS[kind]
    assert b"".join(map(text.spell, text.encode(sample))) == sample.encode()


def test_spelling_of_pieces_that_are_no_plain_text() -> None:
    ids = BYTE_FALLBACK.encode("ab 文")
    assert [BYTE_FALLBACK.spell(token) for token in ids] == [
        *(b"<s>", b" ", b"a", b"b", b" "),
        *(bytes([byte]) for byte in "文".encode()),
    ]
    [end] = BYTE_LEVEL.encode("<|end|>")
    assert BYTE_LEVEL.spell(end) == b"<|end|>"


def test_a_tokenizer_without_a_decoder_spells_what_it_decodes() -> None:
    plain = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    text = TokenizerText(plain.to_str().encode())
    assert [text.spell(token) for token in (0, 1)] == [b"one", b"two"]


@pytest.mark.parametrize("text", [*KINDS.values(), NoText()])
@pytest.mark.parametrize("token", [-1, 10**6, 2**62])
def test_a_token_that_there_is_not_has_no_spelling(text: Text, token: int) -> None:
    assert text.spell(token) == b""


def test_a_text_that_has_its_special_tokens_gets_no_more() -> None:
    made = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    made.add_special_tokens(["<s>"])
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    text = TokenizerText(made.to_str().encode())
    assert text.encode("<s>a").count(begin) == 2
    assert text.encode("<s>a", plain=False) == [begin, *text.encode("a", plain=False)]


def test_a_text_is_neither_cut_nor_padded_to_what_a_batch_once_was() -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=6, pad_id=2, pad_token="<pad>")
    assert TokenizerText(made.to_str().encode()).encode("a b a b") == [0, 1, 0, 1]


def made_of(**parts: Any) -> bytes:
    """A tokenizer of the words "a" and "b", with these parts in its file."""
    file = json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>")).to_str())
    return json.dumps(file | parts).encode()


def test_a_text_with_a_word_that_the_tokenizer_does_not_have_is_one_line() -> None:
    text = TokenizerText(made_of())
    assert text.encode("a") == [0]
    with pytest.raises(JobError, match=r"^prompt: the model's tokenizer cannot read it: WordLevel error"):
        text.encode("c")


def test_a_file_that_makes_the_library_panic_is_one_line() -> None:
    """A panic of Rust is no Exception: nobody would catch it, and whoever waits would wait for ever."""
    chopped = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    with pytest.raises(JobError, match=r"^the model's tokenizer cannot be read: range end index"):
        TokenizerText(made_of(model={**chopped, "continuing_subword_prefix": "####"}))
    empty = TokenizerText(made_of(pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(JobError, match=r"^prompt: the model's tokenizer cannot read it: chunk size"):
        empty.encode("a")
    short = TokenizerText(made_of(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}))
    with pytest.raises(JobFailed, match=r"^the model's tokenizer cannot write its tokens: index out of"):
        streamed(short, [0], [1])


THOUSANDFOLD: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
CHARSMAP = base64.b64encode(bytes(4) + b"x" * 10**6 + b"\0").decode()
SELF = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
COPIES = {"type": "TemplateProcessing", "single": [SELF] * 1000, "pair": [], "special_tokens": {}}
GROWING: dict[str, dict[str, Any]] = {
    "one step": {"normalizer": THOUSANDFOLD | {"content": "a" * 10**6}},
    "several": {"normalizer": {"type": "Sequence", "normalizers": [THOUSANDFOLD, THOUSANDFOLD]}},
    "without a kind": {"normalizer": {"pattern": {"String": "a"}, "content": "a" * 10**6}},
    "what a regex finds": {"normalizer": THOUSANDFOLD | {"pattern": {"Regex": ""}, "content": "a" * 10**6}},
    "before": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
    "a table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 20}},
    "blanks": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES | {"add_prefix_space": True}] * 10}
    },
    "itself": {"post_processor": {"type": "Sequence", "processors": [COPIES, COPIES]}},
}


@pytest.mark.parametrize("parts", GROWING.values(), ids=GROWING)
def test_a_text_is_not_read_that_its_tokenizer_would_make_too_long(parts: dict[str, Any]) -> None:
    """A process that the library finds no memory in ends."""
    with pytest.raises(JobError, match=r"34 bytes of text, .* may make \d{7} times as long|cannot be read"):
        TokenizerText(made_of(**parts)).encode("a" * 34)


@pytest.mark.parametrize(
    "parts",
    [
        {"decoder": {"type": "Sequence", "decoders": [THOUSANDFOLD, THOUSANDFOLD]}},
        {
            "normalizer": {"type": "Sequence", "normalizers": [THOUSANDFOLD, THOUSANDFOLD]},
            "added_tokens": [
                {"id": 2, "content": "a" * 34, "normalized": True, "special": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            ],
        },
    ],
)
def test_a_tokenizer_of_endless_tokens_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="its steps make tokens too long"):
        TokenizerText(made_of(**parts))


def test_a_tokenizer_that_puts_a_million_tokens_around_a_text_is_refused() -> None:
    special = {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}}
    template = {"single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 10 + [SELF, SELF]}
    one = {"type": "TemplateProcessing", "pair": [], "special_tokens": special} | template
    text = TokenizerText(made_of(post_processor=one))
    assert text._grows == 2 and len(text.encode("a")) == 10_002
    with pytest.raises(JobError, match=r"it puts 150000 tokens beside each text; at most \d+$"):
        TokenizerText(made_of(post_processor={"type": "Sequence", "processors": [one] * 4}))


def test_usual_tokenizers_take_texts_of_hundreds_of_kibibytes() -> None:
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    words = {"type": "Prepend", "prepend": "\u2581"}
    begun = {
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, SELF],
        "pair": [],
        "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
    }
    text = TokenizerText(
        made_of(
            normalizer={"type": "Sequence", "normalizers": [words, replaced]},
            post_processor={"type": "TemplateProcessing", **begun},
        )
    )
    for each in (text, BYTE_FALLBACK, BYTE_LEVEL):
        assert isinstance(each, TokenizerText) and 1 <= each._grows <= MAX_GROWN_BYTES >> 20


def unigram(words: int, each: int) -> dict[str, Any]:
    vocabulary = [["u", 0.0], *([f"{i:0{each}}", -1.0] for i in range(words))]
    return {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}}


def added(tokens: int, each: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"added_tokens": [{"id": i, "content": f"{i:0{each}}", **flags} for i in range(tokens)]}


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (unigram(800, 8000), "words of 6400001 bytes; at most 4194304"),
        (added(300, 8000), "added tokens of 2400000 bytes; at most 2097152"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1021}}, "more than 1024 steps"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a" * 70_000}}}, "a pattern of more than 65536"),
    ],
)  # fmt: skip
def test_what_takes_gigabytes_to_read_is_refused_before_it_is_read(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        TokenizerText(made_of(**parts))


def test_the_memory_of_a_tokenizer_is_bounded_by_its_file_and_its_words() -> None:
    file = made_of(**unigram(10, 100))
    assert TokenizerText(file).memory_bytes == 21 * len(file) + 420 * 1001


def test_words_that_would_take_hours_are_refused() -> None:
    pieces = {
        "type": "WordPiece",
        "vocab": {"a": 0, "b": 1},
        "unk_token": "a",
        "continuing_subword_prefix": "##",
    }
    assert TokenizerText(made_of(model={**pieces, "max_input_chars_per_word": 100})).encode("c" * 150) == [0]
    with pytest.raises(JobError, match="words of 1000000000 characters; at most 256"):
        TokenizerText(made_of(model={**pieces, "max_input_chars_per_word": 10**9}))
