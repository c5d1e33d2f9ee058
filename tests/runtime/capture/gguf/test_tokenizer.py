"""The tokenizer of a GGUF file gives the ids and the text of the one that it was written from."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import gguf_files
from support.gguf_files import CONTROL, UNKNOWN, USER_DEFINED
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from fusion.runtime.capture.gguf import tokenizer as gguf_tokenizer
from fusion.runtime.capture.gguf.header import read_header
from fusion.runtime.capture.gguf.tokenizer import GGUFTokenizer, read_tokenizer
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE
from fusion.runtime.job.text import TokenizerText

TEXTS = [
    "Hello, world!", " leading and trailing ", "two  spaces, three   of them\n\n\tand tabs", "",
    "don't they'll I'VE 1234567 3.14 x2", "caf\u00e9 cafe\u0301 na\u00efve \u4f60\u597d \U0001f600 \u00a0 \u2028",
    "def f(x):\n        return x  # (y) [z] {w} ++ -- == ...", "a<|end|>b <think>c</think>\r\n d", "<s>[INST] x</s>",
]  # fmt: skip
SAMPLE = [
    "the quick brown fox jumps over the lazy dog, don't they? I'll say so 1234 times (or 5678). " * 3,
    "def function(argument):\n        return argument + 1  # caf\u00e9, na\u00efve\n" * 3,
]


def read(path: Path, architecture: str = "llama") -> GGUFTokenizer:
    return read_tokenizer(read_header(path), architecture)


def same(found: GGUFTokenizer, original: Tokenizer, prefix: Sequence[int] = ()) -> None:
    assert found.file is not None
    ours = TokenizerText(found.file)
    for text in TEXTS:
        wanted = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, plain=False) == wanted, text
        assert ours.encode(text) == [*prefix, *wanted]
        stream = ours.stream([])
        shown = "".join(stream.push(token) for token in wanted) + stream.finish()
        assert shown == original.decode(wanted), text


# --- byte-level

ADDED = {
    "<|end|>": CONTROL,
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
}


@functools.cache
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with ADDED at its end, and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SAMPLE, BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    )
    state = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(state["vocab"])
    for token in ADDED:
        vocabulary[token] = len(vocabulary)
    return vocabulary, [tuple(merge) for merge in state["merges"]]


def bytewise(tokenizer: Tokenizer, *splits: str, then: Sequence[Any] = ()) -> Tokenizer:
    """Splits texts by these expressions, one after the other, and by `then`, and takes their bytes for characters."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splits),
            *then,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def llama3(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """As the tokenizer.json of Llama 3 has it."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return bytewise(tokenizer, split)


def seed_coder(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    return bytewise(tokenizer, split)


def deepseek_llm(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Its letters are fewer than these, of the scripts here the same."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    marks = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
    east = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
    splits = (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", marks, r"\s+$", east)
    return bytewise(tokenizer, *splits, then=[pre_tokenizers.Digits(individual_digits=False)])


def deepseek_coder(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    splits = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splits),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def smollm(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def deepseek_v3(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """As its tokenizer.json has it."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    words = (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return bytewise(tokenizer, r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", words)


def qwen35(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return bytewise(tokenizer, split)


def kimi(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """As its tokenization_kimi.py has it."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower, ends = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    split = (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ends}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ends}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return bytewise(tokenizer, split)


def bloom(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    marks = "[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c]"
    return bytewise(tokenizer, rf" ?[^(\s|{marks})]+")


BYTE_LEVEL: dict[str, Any] = {
    "deepseek-v3": deepseek_v3,
    "qwen35": qwen35,
    "kimi-k2": kimi,
    "bloom": bloom,
    "gpt-2": lambda vocab, merges: GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer,
    "qwen2": lambda vocab, merges: Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer,
    "llama-bpe": llama3,
    "smollm": smollm,
    "seed-coder": seed_coder,
    "deepseek-llm": deepseek_llm,
    "deepseek-coder": deepseek_coder,
}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_a_byte_level_tokenizer(pre: str, tmp_path: Path) -> None:
    vocabulary, merges = trained()
    original = BYTE_LEVEL[pre](dict(vocabulary), list(merges))
    original.add_tokens(
        [AddedToken(t, normalized=False, special=kind == CONTROL) for t, kind in ADDED.items()]
    )
    write = gguf_files.byte_level(list(vocabulary), merges, pre, kinds=ADDED, bos="<s>", eos="</s>")
    gguf_files.tokenizer_only(tmp_path / "model.gguf", write)
    found = read(tmp_path / "model.gguf")
    begins = pre == "llama-bpe"  # unless the file says otherwise
    same(found, original, [vocabulary["<s>"]] if begins else [])
    assert found.end_tokens == (vocabulary["</s>"], vocabulary["<|end|>"]) and not found.chat


# What llama.cpp splits and begins as it does another.
ALIKE = {
    "pixtral": "llama-bpe", "falcon-h1": "llama-bpe", "minimax-m2": "gpt-4o", "hunyuan-dense": "deepseek-v3", "kormo": "deepseek-r1-qwen", "minerva-7b": "smollm", "mellum": "gpt-2", "a.x-4.0": "gpt-2",
}  # fmt: skip


@pytest.mark.parametrize("pre", ALIKE)
def test_a_name_that_splits_as_another_one(pre: str, tmp_path: Path) -> None:
    vocabulary, merges = trained()
    found = []
    for name in (pre, ALIKE[pre]):
        write = gguf_files.byte_level(list(vocabulary), merges, name, kinds=ADDED, bos="<s>", eos="</s>")
        gguf_files.tokenizer_only(tmp_path / "model.gguf", write)
        found.append(read(tmp_path / "model.gguf"))
    assert found[0] == found[1]


def test_what_is_put_between_the_texts_of_a_pair_changes_nothing(tmp_path: Path) -> None:
    """Conversions say so wherever the model's own tokenizer has a way to write pairs."""
    vocabulary, merges = trained()
    found = []
    for flags in ({}, {"add_sep_token": False}, {"add_sep_token": True}):
        write = gguf_files.byte_level(
            list(vocabulary), merges, "llama-bpe", kinds=ADDED, flags=flags, bos="<s>", eos="</s>"
        )
        gguf_files.tokenizer_only(tmp_path / "model.gguf", write)
        found.append(read(tmp_path / "model.gguf"))
    assert found[0] == found[1] == found[2]


def test_an_answer_goes_on_behind_what_the_model_thinks(tmp_path: Path) -> None:
    """GPT-OSS ends each part of an answer with the token that other models end theirs with."""
    _, merges = trained()
    vocabulary = list(trained()[0])
    ends = {}
    for more in (["<|return|>"], ["<|call|>"], ["<|return|>", "<|call|>"]):
        kinds = {**ADDED, **dict.fromkeys(more, CONTROL)}
        write = gguf_files.byte_level([*vocabulary, *more], merges, "gpt-4o", kinds=kinds, eos=more[0])
        gguf_files.tokenizer_only(tmp_path / "model.gguf", write, "gpt-oss")
        tokens = [*vocabulary, *more]
        ends[tuple(more)] = {tokens[n] for n in read(tmp_path / "model.gguf", "gpt-oss").end_tokens}
    others = {"<|return|>", "<|call|>", "<|end|>"}
    assert ends.pop(("<|return|>", "<|call|>")) & others == {"<|return|>", "<|call|>"}
    assert all(found & others == {*more, "<|end|>"} for more, found in ends.items())


def test_how_a_prompt_begins_and_ends_is_as_the_file_says(tmp_path: Path) -> None:
    vocabulary, merges = trained()
    for begins, ends in ((True, False), (False, True), (True, True)):
        flags = {"add_bos_token": begins, "add_eos_token": ends}
        write = gguf_files.byte_level(
            list(vocabulary), merges, "llama-bpe", kinds=ADDED, flags=flags, bos="<s>", eos="</s>"
        )
        gguf_files.tokenizer_only(tmp_path / "model.gguf", write)
        file = read(tmp_path / "model.gguf").file
        assert file is not None
        ids = TokenizerText(file).encode("x")
        assert (ids[0] == vocabulary["<s>"], ids[-1] == vocabulary["</s>"]) == (begins, ends)


# --- SentencePiece

PIECES = {
    "<pad>": CONTROL, "</s>": CONTROL, "<s>": CONTROL, "<unk>": UNKNOWN, "<|end|>": CONTROL, "<think>": USER_DEFINED,
}  # fmt: skip


@functools.cache
def pieces() -> list[str]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.train_from_iterator(SAMPLE, BpeTrainer(vocab_size=300, show_progress=False))
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    spaces = ["\u2581\u2581", "\u2581\u2581\u2581"]
    first = [*PIECES, *(f"<0x{n:02X}>" for n in range(256)), *spaces]
    return [*first, *(token for token, _ in learned if token not in first)]


def added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=kind != USER_DEFINED) for t, kind in PIECES.items()]
    )
    return tokenizer


def test_gemmas_tokenizer(tmp_path: Path) -> None:
    vocabulary = {token: n for n, token in enumerate(pieces())}
    merges = generate_merges(vocabulary, {token: -n for token, n in vocabulary.items()})
    original = added(GemmaTokenizer(vocab=dict(vocabulary), merges=merges).backend_tokenizer)
    # The conversion writes tokens of spaces alone with real ones, and scores that are in no order.
    written = [" " * len(t) if set(t) == {"\u2581"} and len(t) > 1 else t for t in vocabulary]
    kinds = {**PIECES, "  ": USER_DEFINED, "   ": USER_DEFINED}
    write = gguf_files.sentencepiece(
        written, [0.0] * len(written), kinds=kinds, flags={"add_space_prefix": False},
        bos="<s>", eos="</s>", unknown="<unk>", padding="<pad>", template="{{ bos_token }}{{ messages[0].content }}",
    )  # fmt: skip
    gguf_files.tokenizer_only(tmp_path / "model.gguf", write, "gemma2")
    found = read(tmp_path / "model.gguf", "gemma2")
    same(found, original, [vocabulary["<s>"]])
    assert found.end_tokens == (vocabulary["</s>"], vocabulary["<|end|>"])
    assert found.chat[CHAT_TEMPLATE_FILE].decode() == "{{ bos_token }}{{ messages[0].content }}"
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert json.loads(found.chat[SPECIAL_TOKENS_FILE]) == special


def test_gemma_4s_tokenizer(tmp_path: Path) -> None:
    """Whose files have its merges."""
    vocabulary = {token: n for n, token in enumerate(pieces())}
    merges = generate_merges(vocabulary, {token: -n for token, n in vocabulary.items()})
    original = added(GemmaTokenizer(vocab=dict(vocabulary), merges=merges).backend_tokenizer)
    plain = gguf_files.sentencepiece(
        list(vocabulary), [0.0] * len(vocabulary), kinds=PIECES,
        flags={"add_space_prefix": False, "add_bos_token": True}, bos="<s>", eos="</s>", unknown="<unk>",
    )  # fmt: skip

    def write(writer: Any) -> None:
        plain(writer)
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
            writer.kv_data[-1].pop(key)
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([" ".join(merge) for merge in merges])

    gguf_files.tokenizer_only(tmp_path / "model.gguf", write, "gemma4")
    same(read(tmp_path / "model.gguf", "gemma4"), original, [vocabulary["<s>"]])


def test_llamas_tokenizer(tmp_path: Path) -> None:
    """As the tokenizer.json of Llama 2 has it."""
    vocabulary = {token: n for n, token in enumerate(pieces())}
    scores = {token: -float(n * 7 % 301) for token, n in vocabulary.items()}
    original = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary), merges=generate_merges(vocabulary, scores), unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    original.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    original.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    write = gguf_files.sentencepiece(
        list(vocabulary), list(scores.values()), kinds=PIECES, bos="<s>", eos="</s>", unknown="<unk>"
    )
    gguf_files.tokenizer_only(tmp_path / "model.gguf", write)
    same(read(tmp_path / "model.gguf"), added(original), [vocabulary["<s>"]])


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_tokens_of_phi_3_take_away_the_spaces_behind_them(architecture: str, tmp_path: Path) -> None:
    """As its own tokenizer does, and no file says: a chat is written with a line's end behind each."""
    tokens = [*pieces(), "<|user|>", "<|endoftext|>"]
    kinds = {**PIECES, "</s>": USER_DEFINED, "<|user|>": CONTROL, "<|endoftext|>": CONTROL}
    write = gguf_files.sentencepiece(
        tokens,
        [-float(n) for n in range(len(tokens))],
        kinds=kinds,
        bos="<s>",
        eos="<|endoftext|>",
        unknown="<unk>",
    )
    gguf_files.tokenizer_only(tmp_path / "model.gguf", write, architecture)
    file = read(tmp_path / "model.gguf", architecture).file
    assert file is not None
    text = TokenizerText(file)
    for token, strips in {"<|user|>": True, "</s>": True, "<s>": False, "<|endoftext|>": False}.items():
        same = text.encode(f"{token} \nx", plain=False) == text.encode(f"{token}x", plain=False)
        assert same == (strips and architecture == "phi3"), token
        assert text.encode(f" {token}x", plain=False) != text.encode(f"{token}x", plain=False)


def test_tokens_of_phi_4_leave_the_spaces_behind_them(tmp_path: Path) -> None:
    vocabulary, merges = trained()
    write = gguf_files.byte_level(list(vocabulary), merges, "gpt-4o", kinds=ADDED, eos="<|end|>")
    gguf_files.tokenizer_only(tmp_path / "model.gguf", write, "phi3")
    file = read(tmp_path / "model.gguf", "phi3").file
    assert file is not None
    text = TokenizerText(file)
    assert text.encode("<|end|>\nx", plain=False) != text.encode("<|end|>x", plain=False)


# --- what is refused


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    gguf_files.tokenizer_only(tmp_path / "model.gguf", lambda writer: None)
    assert read(tmp_path / "model.gguf") == GGUFTokenizer(None)


def refused(path: Path, message: str, **changed: Any) -> None:
    """`changed`: values of `tokenizer.ggml.`, in place of those of a tokenizer that would be read; None: none."""
    vocabulary, merges = trained()

    def write(writer: Any) -> None:
        gguf_files.byte_level(list(vocabulary), merges, "gpt-2", kinds=ADDED, bos="<s>", eos="</s>")(writer)
        for key, value in changed.items():
            writer.kv_data[-1].pop(f"tokenizer.ggml.{key}", None)
            if value is not None:
                gguf_files.add(writer, f"tokenizer.ggml.{key}", value)

    gguf_files.tokenizer_only(path, write)
    with pytest.raises(JobError) as error:
        read(path)
    assert message in str(error.value) and str(error.value).isprintable()


def test_what_is_not_understood_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    tokens = list(trained()[0])
    refused(path, "says tokenizer.ggml.model = 't5': gpt2, llama, gemma4 and bert are read", model="t5")
    refused(path, "does not say tokenizer.ggml.pre", pre=None)
    refused(path, "a way to split text that is not known", pre="superbpe")
    refused(
        path,
        "'tokenizer.ggml.normalizer.lowercase', which is not understood",
        **{"normalizer.lowercase": True},
    )
    refused(path, "does not say tokenizer.ggml.tokens: a list", tokens=None)
    refused(path, "the same token twice", tokens=[*tokens, tokens[0]], token_type=None)
    refused(path, f"a number for each of {len(tokens)} tokens", token_type=[1, 2, 3])
    refused(path, "its tokenizer cannot be used", merges=["a \u4f60"])
    refused(path, "two tokens with a space between", merges=["ab"])
    refused(path, f"one of its {len(tokens)} tokens", bos_token_id=len(tokens))
    refused(path, "true or false", add_bos_token=1)
    refused(path, "does not say tokenizer.ggml.scores", model="llama", merges=None)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "MAX_SPECIAL", 4)
        refused(path, "more than 4 tokens that are not of text", eot_token_id=3)
    monkeypatch.setattr(gguf_tokenizer, "MAX_SPLITS", 100)
    refused(path, "too many long tokens", model="llama", merges=None, scores=[0.5] * len(tokens))
    monkeypatch.setattr(gguf_tokenizer, "MAX_TOKENIZER_BYTES", 1000)
    refused(path, "the limit is 1000", eot_token_id=3)
