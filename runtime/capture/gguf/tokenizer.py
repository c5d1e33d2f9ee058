"""The tokenizer in a GGUF file, as the tokenizer.json that peers read; the chat template, and the tokens that end an answer.

Files hold a vocabulary, merges or scores, and llama.cpp's names for how text is split and joined (`src/llama-vocab.cpp`), which are rebuilt
with the `tokenizers` library. An unknown name is refused: text that is split otherwise gives tokens that the model was never trained on, and
answers that look right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fusion.runtime.capture.gguf.header import GGUFHeader, Value, quoted
from fusion.runtime.capture.gguf.metadata import TOKENS
from fusion.runtime.capture.gguf.splitting import SPLITTINGS
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import chat_contents
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
# Limit on the work of deriving merges from scores; Gemma's 256,000 tokens need 2^24
MAX_SPLITS = 1 << 28
MAX_SPECIAL = 1 << 16  # added tokens, which are matched before a text is split; Gemma 3 has 6,400
SPACE = "\u2581"  # as SentencePiece writes one
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of token
_SPECIAL = (_UNKNOWN, _CONTROL, _USER_DEFINED)

# Control tokens that end an answer, beyond the three for which the format has keys.
_END_TOKENS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "</s>",
        "<EOT>",
        "[EOS]",
    ]
)
# In a model with both Harmony tokens, which end answers, _PART ends a part of one, such as its reasoning.
_HARMONY, _PART = frozenset(["<|return|>", "<|call|>"]), "<|end|>"
# Special tokens of Phi-3 that keep the spaces after them; all others strip these.
_UNSTRIPPED = frozenset(["<unk>", "<s>", "<|endoftext|>"])
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_KNOWN_KEYS = frozenset(
    [
        "model",
        "pre",
        "tokens",
        "scores",
        "token_type",
        "merges",
        "add_bos_token",
        "add_eos_token",
        "add_sep_token",  # concerns pairs of texts
        "add_space_prefix",
        "token_type_count",
    ]
)


@dataclass(frozen=True)
class GGUFTokenizer:
    file: bytes | None  # tokenizer.json; None where the file has no tokenizer
    end_tokens: tuple[int, ...] = ()
    chat: Mapping[str, bytes] = field(default_factory=dict)  # as `chat_files` gives it


def read_tokenizer(header: GGUFHeader, architecture: str) -> GGUFTokenizer:
    """The file's tokenizer. JobError for one of an unsupported kind, or that cannot be used."""
    metadata = _TokenizerMetadata(header)
    kind = metadata.text("model", "none")
    if kind in ("none", "no_vocab"):
        return GGUFTokenizer(None)
    build = _BUILDERS.get(kind)
    if build is None:
        raise metadata.error("model", kind, "gpt2, llama, gemma4 and bert are read")
    metadata.check()
    vocabulary = _Vocabulary.of(metadata)
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} if kind == "llama" else {}
    ids = {key: metadata.token_id(key, defaults.get(key)) for key in _SPECIAL_IDS.values()}
    try:
        tokenizer = build(metadata, vocabulary, ids, architecture)
        _add_special(metadata, tokenizer, vocabulary, strips=kind == "llama" and architecture == "phi3")
        data = tokenizer.to_str().encode()
    except JobError:
        raise
    except Exception as error:  # the library raises plain Exception
        reason = quoted(str(error).strip())
        raise JobError(f"{header.path}: its tokenizer cannot be used: {reason}") from None
    if len(data) > MAX_TOKENIZER_BYTES:
        raise JobError(
            f"{header.path}: its tokenizer has {len(data)} bytes; the limit is {MAX_TOKENIZER_BYTES}"
        )
    return GGUFTokenizer(data, _end_tokens(metadata, vocabulary, ids), _chat_files(header, vocabulary, ids))


class _TokenizerMetadata:
    """The metadata under `tokenizer.ggml.`; getters raise JobError for a value of another type."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        value = header.values.get(TOKENS, ())
        self.size = len(value) if isinstance(value, tuple) else 0

    def check(self) -> None:
        """JobError for an unknown key, which may change how the tokenizer works."""
        for key in self.header.values:
            name = key.removeprefix(PREFIX)
            if name != key and name not in _KNOWN_KEYS and not name.endswith("_token_id"):
                raise JobError(f"{self.header.path} says {quoted(key)}, which is not understood")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.header.values.get(PREFIX + name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.header.values.get(PREFIX + name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def token_id(self, name: str, default: int | None) -> int | None:
        value = self.header.values.get(PREFIX + name)
        if value is None:
            return default if default is not None and default < self.size else None
        if type(value) is not int or not 0 <= value < self.size:
            raise self.error(name, value, f"one of its {self.size} tokens")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._list(name)
        texts = tuple(each for each in value if isinstance(each, str))
        if len(texts) < len(value):
            raise self.error(name, "a list of numbers", "a list of texts")
        return texts

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A number for each token; None where the file has no such list."""
        if PREFIX + name not in self.header.values:
            return None
        value = self._list(name)
        numbers = tuple(each for each in value if isinstance(each, int | float))
        if not len(numbers) == len(value) == self.size:
            raise self.error(name, f"a list of {len(value)}", f"a number for each of {self.size} tokens")
        return numbers

    def has(self, name: str) -> bool:
        return PREFIX + name in self.header.values

    def error(self, name: str, value: object, expected: str) -> JobError:
        what = (
            f"says {PREFIX}{name} = {quoted(str(value))}"
            if value is not None
            else f"does not say {PREFIX}{name}"
        )
        return JobError(f"{self.header.path} {what}: {expected}")

    def _list(self, name: str) -> tuple[Value, ...]:
        value = self.header.values.get(PREFIX + name)
        if not isinstance(value, tuple):
            raise self.error(name, value, "a list")
        return value


@dataclass(frozen=True)
class _Vocabulary:
    tokens: tuple[str, ...]
    kinds: tuple[float, ...]  # of each token

    @classmethod
    def of(cls, metadata: _TokenizerMetadata) -> _Vocabulary:
        tokens = tuple(token or f"[EMPTY_{n}]" for n, token in enumerate(metadata.texts("tokens")))
        if len(set(tokens)) < len(tokens):
            raise JobError(f"{metadata.header.path} has the same token twice in its tokenizer")
        return cls(tokens, metadata.numbers("token_type") or (1,) * len(tokens))

    def ids(self) -> dict[str, int]:
        return {token: n for n, token in enumerate(self.tokens)}


_Ids = Mapping[str, int | None]


def _byte_level(
    metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """GPT-2's kind: text is split by expressions, bytes are written as characters and merged in the order of the merges."""
    name = metadata.text("pre", "gpt-2" if architecture == "gpt2" else None)
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise metadata.error("pre", name, "a way to split text that is not known")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_merges(metadata),
            ignore_merges=splitting.whole_words,
            fuse_unk=False,
        )
    )
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splitting.expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_bos_eos(tokenizer, metadata, ids, splitting.begins)
    return tokenizer


def _sentencepiece(
    metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """SentencePiece's BPE: spaces are visible characters, unknown characters fall back to bytes."""
    tokens = _visible_spaces(vocabulary.tokens)
    vocab = {token: n for n, token in enumerate(tokens)}
    if metadata.has("merges"):
        merges = _merges(metadata)
    else:
        scores = metadata.numbers("scores")
        if scores is None:
            raise metadata.error("scores", None, "a number for each token")
        # Gemma's merges are ordered by its tokens, not by its scores, as in transformers.
        ranks = [-float(n) for n in range(len(tokens))] if architecture.startswith("gemma") else scores
        merges = _implied_merges(metadata, tokens, vocab, ranks)
    unknown = ids["unknown_token_id"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.flag("add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    _add_bos_eos(tokenizer, metadata, ids, True)
    return tokenizer


def _wordpiece(
    metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """BERT's kind: lower-cased words without accents, split into the longest known pieces from the left. Files mark pieces that begin a word,
    the library those that do not."""
    tokens = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == _CONTROL:
            tokens.append(token)
        elif token != token.lower():
            raise JobError(
                f"{metadata.header.path}: its tokenizer has {quoted(token)}, and files do not say how capitals are read"
            )
        else:
            tokens.append(token[1:] if token.startswith(SPACE) else f"##{token}")
    if len(set(tokens)) < len(tokens):
        raise JobError(f"{metadata.header.path} has the same token twice in its tokenizer")
    unknown = ids["unknown_token_id"]
    if unknown is None:
        raise metadata.error("unknown_token_id", None, "a token")
    vocab = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=tokens[unknown]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    begins = _first_of(ids, "cls_token_id", "bos_token_id")
    ends = _first_of(ids, "seperator_token_id", "eos_token_id")
    _add_bos_eos(tokenizer, metadata, {"bos_token_id": begins, "eos_token_id": ends}, True, ends=True)
    return tokenizer


def _first_of(ids: _Ids, *names: str) -> int | None:
    return next((found for name in names if (found := ids[name]) is not None), None)


def _visible_spaces(tokens: Sequence[str]) -> list[str]:
    """The tokens with SentencePiece's space character in tokens of spaces alone, which files write with real spaces."""
    visible, taken = [], set(tokens)
    for token in tokens:
        replaced = SPACE * len(token)
        visible.append(replaced if token == " " * len(token) and replaced not in taken else token)
    return visible


def _merges(metadata: _TokenizerMetadata) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.texts("merges"):
        split = merge.find(" ", 1)
        if split < 0:
            raise metadata.error("merges", merge, "two tokens with a space between")
        merges.append((merge[:split], merge[split + 1 :]))
    return merges


def _implied_merges(
    metadata: _TokenizerMetadata, tokens: Sequence[str], vocab: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Two tokens may be merged if together they are a third; a better score of that one goes first. The order is that of transformers."""
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITS:
        raise JobError(f"{metadata.header.path}: its tokenizer has too many long tokens")
    candidates = [
        (scores[n], split, len(token) - split, token)
        for n, token in enumerate(tokens)
        for split in range(1, len(token))
        if token[:split] in vocab and token[split:] in vocab
    ]
    candidates.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:split], token[split:]) for _, split, _, token in candidates]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece, "bert": _wordpiece}


def _add_bos_eos(
    tokenizer: Tokenizer, metadata: _TokenizerMetadata, ids: _Ids, begins: bool, *, ends: bool = False
) -> None:
    """Have texts begin with the BOS token and end with the EOS token where the file wants it. `begins`, `ends`: the defaults."""
    pieces: list[str] = ["$A"]
    special = []
    for flag, key, default in (
        ("add_bos_token", "bos_token_id", begins),
        ("add_eos_token", "eos_token_id", ends),
    ):
        enabled, token = metadata.flag(flag, default), ids[key]
        if not enabled:
            continue
        if token is None:
            if metadata.has(flag):
                raise metadata.error(key, None, f"a token, as {flag} is true")
            continue
        special.append({"id": key, "ids": [token], "tokens": [tokenizer.id_to_token(token)]})
        pieces = [key, *pieces] if key == "bos_token_id" else [*pieces, key]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _add_special(
    metadata: _TokenizerMetadata, tokenizer: Tokenizer, vocabulary: _Vocabulary, *, strips: bool
) -> None:
    """Add the tokens that are matched before a text is split: control tokens and user-defined words. `strips`: whether they strip the spaces
    after them, which no file says."""
    if sum(kind in _SPECIAL for kind in vocabulary.kinds) > MAX_SPECIAL:
        raise JobError(
            f"{metadata.header.path}: its tokenizer has more than {MAX_SPECIAL} tokens that are not of text"
        )
    known = tokenizer.get_vocab(with_added_tokens=False)
    marked = [
        (token, kind)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in _SPECIAL and token in known
    ]
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != _USER_DEFINED,
                rstrip=strips and token not in _UNSTRIPPED,
            )
            for token, kind in marked
        ]
    )


def _end_tokens(metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids) -> tuple[int, ...]:
    declared = [
        ids["eos_token_id"],
        metadata.token_id("eot_token_id", None),
        metadata.token_id("eom_token_id", None),
    ]
    marked = [
        n
        for n, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    ids_of_ends = dict.fromkeys(n for n in (*declared, *marked) if n is not None)
    if {vocabulary.tokens[n] for n in ids_of_ends} >= _HARMONY:
        return tuple(n for n in ids_of_ends if vocabulary.tokens[n] != _PART)
    return tuple(ids_of_ends)


def _chat_files(header: GGUFHeader, vocabulary: _Vocabulary, ids: _Ids) -> dict[str, bytes]:
    template = header.values.get(CHAT_TEMPLATE)
    if template is None:
        return {}
    if not isinstance(template, str):
        raise JobError(f"{header.path}: {CHAT_TEMPLATE} must be a text")
    tokens = {name: vocabulary.tokens[n] for name, key in _SPECIAL_IDS.items() if (n := ids[key]) is not None}
    return chat_contents(template, tokens, header.path)
