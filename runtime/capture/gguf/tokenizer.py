"""The tokenizer in a GGUF file, as the tokenizer.json that peers read; the chat template, and the tokens that end an answer.

Files hold a vocabulary, merges or scores, and names for how text is split and joined, in llama.cpp's terms
(`src/llama-vocab.cpp`). What such a name stands for is rebuilt with the `tokenizers` library. A name that is not known is
refused: text that is split in another way gives tokens that the model was never trained on, and answers that look right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fusion.runtime.capture.gguf.header import GGUFHeader, Value, shown
from fusion.runtime.capture.gguf.metadata import TOKENS
from fusion.runtime.capture.gguf.splitting import SPLITTINGS
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import chat_contents
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
# Characters that are looked at where merges are found from scores; Gemma's 256,000 tokens need 2^24
MAX_SPLITS = 1 << 28
MAX_SPECIAL = 1 << 16  # tokens that are found before a text is split; Gemma 3 has 6,400
SPACE = "\u2581"  # as SentencePiece writes one
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of token
_SPECIAL = (_UNKNOWN, _CONTROL, _USER_DEFINED)

# Control tokens that end what a model says, whatever else the file names: its format has room for three.
_ENDS = frozenset(
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
# Where a model has both of these, which end its answers, the other ends a part of one: what it thinks before it answers, say.
_HARMONY, _PART = frozenset(["<|return|>", "<|call|>"]), "<|end|>"
# Tokens of Phi-3 that leave the spaces behind them to the text; all others that are not of text take them away.
_PLAIN = frozenset(["<unk>", "<s>", "<|endoftext|>"])
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_UNDERSTOOD = frozenset(
    [
        "model",
        "pre",
        "tokens",
        "scores",
        "token_type",
        "merges",
        "add_bos_token",
        "add_eos_token",
        "add_sep_token",  # between the texts of a pair
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
    """JobError for a tokenizer of a kind that is not read, or one that cannot be."""
    metadata = _TokenizerMetadata(header)
    kind = metadata.text("model", "none")
    if kind in ("none", "no_vocab"):
        return GGUFTokenizer(None)
    build = _BUILDERS.get(kind)
    if build is None:
        raise metadata.bad("model", kind, "gpt2, llama, gemma4 and bert are read")
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
    except Exception as error:  # the library raises plain Exception for whatever it cannot use
        reason = shown(str(error).strip())
        raise JobError(f"{header.path}: its tokenizer cannot be used: {reason}") from None
    if len(data) > MAX_TOKENIZER_BYTES:
        raise JobError(
            f"{header.path}: its tokenizer has {len(data)} bytes; the limit is {MAX_TOKENIZER_BYTES}"
        )
    return GGUFTokenizer(data, _ends(metadata, vocabulary, ids), _chat(header, vocabulary, ids))


class _TokenizerMetadata:
    """What the file says under `tokenizer.ggml.`"""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        found = header.values.get(TOKENS, ())
        self.size = len(found) if isinstance(found, tuple) else 0

    def check(self) -> None:
        """JobError for a key that is not understood, and may change what the tokenizer gives."""
        for key in self.header.values:
            name = key.removeprefix(PREFIX)
            if name != key and name not in _UNDERSTOOD and not name.endswith("_token_id"):
                raise JobError(f"{self.header.path} says {shown(key)}, which is not understood")

    def text(self, name: str, default: str | None = None) -> str:
        found = self.header.values.get(PREFIX + name, default)
        if not isinstance(found, str):
            raise self.bad(name, found, "a text")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.header.values.get(PREFIX + name, default)
        if not isinstance(found, bool):
            raise self.bad(name, found, "true or false")
        return found

    def token_id(self, name: str, default: int | None) -> int | None:
        found = self.header.values.get(PREFIX + name)
        if found is None:
            return default if default is not None and default < self.size else None
        if type(found) is not int or not 0 <= found < self.size:
            raise self.bad(name, found, f"one of its {self.size} tokens")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        found = self._list(name)
        texts = tuple(each for each in found if isinstance(each, str))
        if len(texts) < len(found):
            raise self.bad(name, "a list of numbers", "a list of texts")
        return texts

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """One for each token; None where the file has no such list."""
        if PREFIX + name not in self.header.values:
            return None
        found = self._list(name)
        numbers = tuple(each for each in found if isinstance(each, int | float))
        if not len(numbers) == len(found) == self.size:
            raise self.bad(name, f"a list of {len(found)}", f"a number for each of {self.size} tokens")
        return numbers

    def has(self, name: str) -> bool:
        return PREFIX + name in self.header.values

    def bad(self, name: str, found: object, wanted: str) -> JobError:
        what = (
            f"says {PREFIX}{name} = {shown(str(found))}"
            if found is not None
            else f"does not say {PREFIX}{name}"
        )
        return JobError(f"{self.header.path} {what}: {wanted}")

    def _list(self, name: str) -> tuple[Value, ...]:
        found = self.header.values.get(PREFIX + name)
        if not isinstance(found, tuple):
            raise self.bad(name, found, "a list")
        return found


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
    """GPT-2's: text is split by an expression, bytes are written as characters, and merged in the order of training."""
    name = metadata.text("pre", "gpt-2" if architecture == "gpt2" else None)
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise metadata.bad("pre", name, "a way to split text that is not known")
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
    _add_ends(tokenizer, metadata, ids, splitting.begins)
    return tokenizer


def _sentencepiece(
    metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """SentencePiece's BPE: spaces are visible characters, unknown characters are bytes."""
    tokens = _visible_spaces(vocabulary.tokens)
    vocab = {token: n for n, token in enumerate(tokens)}
    if metadata.has("merges"):
        merges = _merges(metadata)
    else:
        scores = metadata.numbers("scores")
        if scores is None:
            raise metadata.bad("scores", None, "a number for each token")
        # Gemma's scores are not in the order of its merges; its tokens are, as transformers takes them.
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
    _add_ends(tokenizer, metadata, ids, True)
    return tokenizer


def _wordpiece(
    metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """BERT's: words without capitals and accents, each the longest pieces that begin it, and so on. The file marks pieces that begin a
    word; the library, those that do not."""
    tokens = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == _CONTROL:
            tokens.append(token)
        elif token != token.lower():
            raise JobError(
                f"{metadata.header.path}: its tokenizer has {shown(token)}, and files do not say how capitals are read"
            )
        else:
            tokens.append(token[1:] if token.startswith(SPACE) else f"##{token}")
    if len(set(tokens)) < len(tokens):
        raise JobError(f"{metadata.header.path} has the same token twice in its tokenizer")
    unknown = ids["unknown_token_id"]
    if unknown is None:
        raise metadata.bad("unknown_token_id", None, "a token")
    vocab = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=tokens[unknown]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    begins = _first_of(ids, "cls_token_id", "bos_token_id")
    ends = _first_of(ids, "seperator_token_id", "eos_token_id")
    _add_ends(tokenizer, metadata, {"bos_token_id": begins, "eos_token_id": ends}, True, ends=True)
    return tokenizer


def _first_of(ids: _Ids, *names: str) -> int | None:
    return next((found for name in names if (found := ids[name]) is not None), None)


def _visible_spaces(tokens: Sequence[str]) -> list[str]:
    """Tokens of spaces alone are written with real ones; SentencePiece finds them among its own."""
    found, taken = [], set(tokens)
    for token in tokens:
        written = SPACE * len(token)
        found.append(written if token == " " * len(token) and written not in taken else token)
    return found


def _merges(metadata: _TokenizerMetadata) -> list[tuple[str, str]]:
    found = []
    for merge in metadata.texts("merges"):
        at = merge.find(" ", 1)
        if at < 0:
            raise metadata.bad("merges", merge, "two tokens with a space between")
        found.append((merge[:at], merge[at + 1 :]))
    return found


def _implied_merges(
    metadata: _TokenizerMetadata, tokens: Sequence[str], vocab: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Any two tokens that make a third may be merged; the better its score, the sooner. As transformers orders them."""
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITS:
        raise JobError(f"{metadata.header.path}: its tokenizer has too many long tokens")
    found = [
        (scores[n], at, len(token) - at, token)
        for n, token in enumerate(tokens)
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in found]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece, "bert": _wordpiece}


def _add_ends(
    tokenizer: Tokenizer, metadata: _TokenizerMetadata, ids: _Ids, begins: bool, *, ends: bool = False
) -> None:
    """Have a prompt begin with the first token and end with the last, as far as the file wants it."""
    pieces: list[str] = ["$A"]
    special = []
    for flag, key, default in (
        ("add_bos_token", "bos_token_id", begins),
        ("add_eos_token", "eos_token_id", ends),
    ):
        wanted, token = metadata.flag(flag, default), ids[key]
        if not wanted:
            continue
        if token is None:
            if metadata.has(flag):
                raise metadata.bad(key, None, f"a token, as {flag} is true")
            continue
        special.append({"id": key, "ids": [token], "tokens": [tokenizer.id_to_token(token)]})
        pieces = [key, *pieces] if key == "bos_token_id" else [*pieces, key]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _add_special(
    metadata: _TokenizerMetadata, tokenizer: Tokenizer, vocabulary: _Vocabulary, *, strips: bool
) -> None:
    """Tokens that are found in a text before it is split: those for what is not text, and whole words of their own. `strips`: whether
    they take away the spaces behind them, which no file says."""
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
                token, normalized=False, special=kind != _USER_DEFINED, rstrip=strips and token not in _PLAIN
            )
            for token, kind in marked
        ]
    )


def _ends(metadata: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids) -> tuple[int, ...]:
    named = [
        ids["eos_token_id"],
        metadata.token_id("eot_token_id", None),
        metadata.token_id("eom_token_id", None),
    ]
    marked = [
        n
        for n, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind == _CONTROL and token in _ENDS
    ]
    found = dict.fromkeys(n for n in (*named, *marked) if n is not None)
    if {vocabulary.tokens[n] for n in found} >= _HARMONY:
        return tuple(n for n in found if vocabulary.tokens[n] != _PART)
    return tuple(found)


def _chat(header: GGUFHeader, vocabulary: _Vocabulary, ids: _Ids) -> dict[str, bytes]:
    template = header.values.get(CHAT_TEMPLATE)
    if template is None:
        return {}
    if not isinstance(template, str):
        raise JobError(f"{header.path}: {CHAT_TEMPLATE} must be a text")
    tokens = {name: vocabulary.tokens[n] for name, key in _SPECIAL_IDS.items() if (n := ids[key]) is not None}
    return chat_contents(template, tokens, header.path)
