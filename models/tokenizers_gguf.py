"""A tokenizer rebuilt from GGUF metadata (`tokenizer.ggml.*`). Knows the two kinds that the served models use,
byte-level BPE ("gpt2") and SentencePiece BPE ("llama"); does not know where the file came from.

GGUF stores a tokenizer's tables but only *names* how text is cut before merging (`tokenizer.ggml.pre`). What each name
stands for is a fact of the model's original tokenizer.json, and is the table here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from gguf import TokenType
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jpaged.tokenizer import HFTokenizer
from models.errors import ModelError
from models.gguf_metadata import read_metadata
from models.sources.fields import Fields

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # how SentencePiece writes a space
_WAY_OUT = "fetch the file again, or load the model from its Hugging Face folder"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# A word that turns to capitals once at most: caps, then small letters (o200k's rule).
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Cut:
    """How text is cut before merging: each pattern in turn cuts what the one before it left, matches and gaps alike."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is that token, whatever the merges would make of it
    add_bos: bool = False  # when the file does not say


_LLAMA3 = _Cut((rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, add_bos=True)
_QWEN2 = _Cut((rf"{_ENDING}|{_WORD}|\p{{N}}|{_REST}",))
_DIGITS = _Cut((r"\p{N}", _GPT2))
_GPT4O = _Cut((rf"{_CASED[0]}{_ENDING}?|{_CASED[1]}{_ENDING}?|\p{{N}}{{1,3}}|{_CASED_REST}",))
_CUTS = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "tekken": _Cut((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",), whole_words=True, add_bos=True),
    "deepseek-v3": _Cut(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut for byte-level BPE, by its name in GGUF. Raises ValueError for a name that is not known."""
    if name not in _CUTS:
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported; supported are {', '.join(sorted(_CUTS))}")
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _CUTS[name].patterns]
    return pre_tokenizers.Sequence(splits)


def from_gguf(path: Path) -> HFTokenizer:
    """The tokenizer in the GGUF file at `path`, chat template and end-of-text ids included.

    Raises:
      ModelError: the file is not whole GGUF, holds no tokenizer, or one of a kind that is not supported, or its fields
        are malformed or do not fit each other.
    """
    f = Fields(read_metadata(path), [])
    kind, tokens = f.text(_PREFIX + "model", None), f.texts(_PREFIX + "tokens")
    if not f.problems and (kind not in ("gpt2", "llama") or not tokens):
        raise ModelError(
            f"{path} has tokenizer.ggml.model = {kind!r} with {len(tokens)} tokens; supported are 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece BPE). Load the model from its Hugging Face folder instead."
        )
    try:
        _refuse(f.problems)  # without tokens, all that follows would only add noise
        return _built(f, tokens, kind)
    except ValueError as error:
        raise ModelError(f"The tokenizer in {path} cannot be used: {error}; {_WAY_OUT}.") from error


def _built(f: Fields, tokens: tuple[str, ...], kind: str) -> HFTokenizer:
    """Everything is read before anything is built, so that one error names all faults."""
    ids = range(len(tokens))
    types = (TokenType.NORMAL,) * len(ids)
    if f.has(_PREFIX + "token_type"):
        types = _one_for_each(f, _PREFIX + "token_type", f.integers, tokens)
    bos = f.integer(_PREFIX + "bos_token_id", None, within=ids)
    ends = [f.integer(f"{_PREFIX}{name}_token_id", None, within=ids) for name in ("eos", "eot", "eom")]
    template, wants_bos = f.text("tokenizer.chat_template", None), f.flag(_PREFIX + "add_bos_token", None)
    backend, kind_wants_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(f, tokens, types)
    backend.add_tokens(_added_tokens(tokens, types))
    return HFTokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        chat_template=template,
        add_bos=bos is not None and (kind_wants_bos if wants_bos is None else wants_bos),
    )


def _one_for_each(f: Fields, name: str, read: Callable[[str], tuple], tokens: tuple[str, ...]) -> tuple:
    known, values = len(f.problems), read(name)
    if len(f.problems) == known and len(values) != len(tokens):
        f.note(f"{len(tokens)} tokens need as many {name}, there are {len(values)}")
    return values


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _byte_level(f: Fields, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[tokenizers.Tokenizer, bool]:
    name = f.text(_PREFIX + "pre", "default")
    merges = [_split_merge(merge) for merge in f.texts(_PREFIX + "merges")]
    _refuse(f.problems)
    pieces, cut = pre_tokenizer(name), _CUTS[name]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if strays := [pair for pair in merges if not (pair[0] in ids and pair[1] in ids and "".join(pair) in ids)]:
        raise ValueError(f"{len(strays)} merges use tokens that are not in the vocabulary, such as {strays[0]}")
    backend = tokenizers.Tokenizer(BPE(ids, merges, ignore_merges=cut.whole_words))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(f: Fields, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE merges the pair whose joined token scores highest. That is BPE with a rank per pair, once
    every way to split a token into two tokens is listed, best score first (its trainer gives no two tokens that can be
    merged the same score)."""
    scores = _one_for_each(f, _PREFIX + "scores", f.numbers, tokens)
    unknown = f.integer(_PREFIX + "unknown_token_id", None, within=range(len(tokens)))
    prefixed = f.flag(_PREFIX + "add_space_prefix", True)
    _refuse(f.problems)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    mergeable = [i for i, kind in enumerate(types) if kind in (TokenType.NORMAL, TokenType.UNUSED)]
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in sorted(mergeable, key=lambda i: -scores[i]))
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids
    ]
    fallback = TokenType.BYTE in types
    backend = tokenizers.Tokenizer(
        BPE(ids, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=fallback)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend, True


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[tokenizers.AddedToken]:
    """Tokens that are found in a text before it is cut: control tokens, which decoding may skip, and the user's."""
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [
        tokenizers.AddedToken(token, special=special[TokenType(kind)], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special and token
    ]
