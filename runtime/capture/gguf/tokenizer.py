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

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# What the tokenizer of DeepSeek LLM takes for letters: those with a case, of some scripts.
_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376-\u0377\u037b-\u037d\u037f"
    "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2-\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN35 = _QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|", 1).replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
# As Tekken's and GPT-4o's, but for Chinese characters, which are words by themselves.
_KIMI = (
    r"[\p{Han}]+|"
    + (_CASED % (_SUFFIX, _SUFFIX)).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
    + r"|\p{N}{1,3}"
    + _REST
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_EASTERN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


@dataclass(frozen=True)
class Splitting:
    """How a byte-level tokenizer cuts text before it merges: by each expression after another."""

    expressions: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is not merged from parts
    begins: bool = False  # the text begins with the first token, unless the file says otherwise
    composed: bool = False  # characters are composed first (NFC), as the model's own tokenizer does


_BY_NAME = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "a.x-4.0"), Splitting((_GPT2,))),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "pixtral"),
        Splitting((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting((_LLAMA3,))),
    "qwen2": Splitting((_QWEN2,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo"), Splitting((_QWEN2,))),
    "tekken": Splitting((_CASED % ("", "") + r"|\p{N}" + _SLASHED,), whole_words=True, begins=True),
    "qwen35": Splitting((_QWEN35,), composed=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splitting(_DEEPSEEK_V3)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splitting((_BLOOM,))),
    "kimi-k2": Splitting((_KIMI,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Splitting((_CASED % (_SUFFIX, _SUFFIX) + r"|\p{N}{1,3}" + _SLASHED,))),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), Splitting((r"\p{N}", _GPT2))
    ),
    "seed-coder": Splitting((_QWEN2.replace(r"[\r\n]*", "", 1),)),
    "deepseek-llm": Splitting(("[\r\n]", rf"\s?[{_LETTERS}]+", _MARKS, r"\s+$", _EASTERN, r"\p{N}+")),
    "deepseek-coder": Splitting(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip

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
    said = _TokenizerMetadata(header)
    kind = said.text("model", "none")
    if kind in ("none", "no_vocab"):
        return GGUFTokenizer(None)
    build = _BUILDERS.get(kind)
    if build is None:
        raise said.bad("model", kind, "gpt2, llama, gemma4 and bert are read")
    said.check()
    vocabulary = _Vocabulary.of(said)
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} if kind == "llama" else {}
    ids = {key: said.token_id(key, defaults.get(key)) for key in _SPECIAL_IDS.values()}
    try:
        tokenizer = build(said, vocabulary, ids, architecture)
        _add_special(said, tokenizer, vocabulary, strips=kind == "llama" and architecture == "phi3")
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
    return GGUFTokenizer(data, _ends(said, vocabulary, ids), _chat(header, vocabulary, ids))


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
    def of(cls, said: _TokenizerMetadata) -> _Vocabulary:
        tokens = tuple(token or f"[EMPTY_{n}]" for n, token in enumerate(said.texts("tokens")))
        if len(set(tokens)) < len(tokens):
            raise JobError(f"{said.header.path} has the same token twice in its tokenizer")
        return cls(tokens, said.numbers("token_type") or (1,) * len(tokens))

    def ids(self) -> dict[str, int]:
        return {token: n for n, token in enumerate(self.tokens)}


_Ids = Mapping[str, int | None]


def _byte_level(said: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str) -> Tokenizer:
    """GPT-2's: text is split by an expression, bytes are written as characters, and merged in the order of training."""
    name = said.text("pre", "gpt-2" if architecture == "gpt2" else None)
    splitting = _BY_NAME.get(name)
    if splitting is None:
        raise said.bad("pre", name, "a way to split text that is not known")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(), merges=_merges(said), ignore_merges=splitting.whole_words, fuse_unk=False
        )
    )
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splitting.expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, said, ids, splitting.begins)
    return tokenizer


def _sentencepiece(
    said: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str
) -> Tokenizer:
    """SentencePiece's BPE: spaces are visible characters, unknown characters are bytes."""
    tokens = _visible_spaces(vocabulary.tokens)
    vocab = {token: n for n, token in enumerate(tokens)}
    if said.has("merges"):
        merges = _merges(said)
    else:
        scores = said.numbers("scores")
        if scores is None:
            raise said.bad("scores", None, "a number for each token")
        # Gemma's scores are not in the order of its merges; its tokens are, as transformers takes them.
        ranks = [-float(n) for n in range(len(tokens))] if architecture.startswith("gemma") else scores
        merges = _implied_merges(said, tokens, vocab, ranks)
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
    prefixed = said.flag("add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    _add_ends(tokenizer, said, ids, True)
    return tokenizer


def _wordpiece(said: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids, architecture: str) -> Tokenizer:
    """BERT's: words without capitals and accents, each the longest pieces that begin it, and so on. The file marks pieces that begin a
    word; the library, those that do not."""
    tokens = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == _CONTROL:
            tokens.append(token)
        elif token != token.lower():
            raise JobError(
                f"{said.header.path}: its tokenizer has {shown(token)}, and files do not say how capitals are read"
            )
        else:
            tokens.append(token[1:] if token.startswith(SPACE) else f"##{token}")
    if len(set(tokens)) < len(tokens):
        raise JobError(f"{said.header.path} has the same token twice in its tokenizer")
    unknown = ids["unknown_token_id"]
    if unknown is None:
        raise said.bad("unknown_token_id", None, "a token")
    vocab = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=tokens[unknown]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    begins = _first_of(ids, "cls_token_id", "bos_token_id")
    ends = _first_of(ids, "seperator_token_id", "eos_token_id")
    _add_ends(tokenizer, said, {"bos_token_id": begins, "eos_token_id": ends}, True, ends=True)
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


def _merges(said: _TokenizerMetadata) -> list[tuple[str, str]]:
    found = []
    for merge in said.texts("merges"):
        at = merge.find(" ", 1)
        if at < 0:
            raise said.bad("merges", merge, "two tokens with a space between")
        found.append((merge[:at], merge[at + 1 :]))
    return found


def _implied_merges(
    said: _TokenizerMetadata, tokens: Sequence[str], vocab: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Any two tokens that make a third may be merged; the better its score, the sooner. As transformers orders them."""
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITS:
        raise JobError(f"{said.header.path}: its tokenizer has too many long tokens")
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
    tokenizer: Tokenizer, said: _TokenizerMetadata, ids: _Ids, begins: bool, *, ends: bool = False
) -> None:
    """Have a prompt begin with the first token and end with the last, as far as the file wants it."""
    pieces: list[str] = ["$A"]
    special = []
    for flag, key, default in (
        ("add_bos_token", "bos_token_id", begins),
        ("add_eos_token", "eos_token_id", ends),
    ):
        wanted, token = said.flag(flag, default), ids[key]
        if not wanted:
            continue
        if token is None:
            if said.has(flag):
                raise said.bad(key, None, f"a token, as {flag} is true")
            continue
        special.append({"id": key, "ids": [token], "tokens": [tokenizer.id_to_token(token)]})
        pieces = [key, *pieces] if key == "bos_token_id" else [*pieces, key]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _add_special(
    said: _TokenizerMetadata, tokenizer: Tokenizer, vocabulary: _Vocabulary, *, strips: bool
) -> None:
    """Tokens that are found in a text before it is split: those for what is not text, and whole words of their own. `strips`: whether
    they take away the spaces behind them, which no file says."""
    if sum(kind in _SPECIAL for kind in vocabulary.kinds) > MAX_SPECIAL:
        raise JobError(
            f"{said.header.path}: its tokenizer has more than {MAX_SPECIAL} tokens that are not of text"
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


def _ends(said: _TokenizerMetadata, vocabulary: _Vocabulary, ids: _Ids) -> tuple[int, ...]:
    named = [ids["eos_token_id"], said.token_id("eot_token_id", None), said.token_id("eom_token_id", None)]
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
