"""Small tokenizers of the two kinds, made in memory: a byte-level BPE and a SentencePiece BPE with byte fallback."""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 letters that stand for bytes


def byte_level() -> Tokenizer:
    """Ids: 0 to 255 the letters, then `he`, `hel`, ` w` (a space is Ġ), `é` (two bytes), <s>, </s>, and a user's token
    with a space in it, which is no byte letter."""
    merges = [("h", "e"), ("he", "l"), ("Ġ", "w"), ("Ã", "©")]
    tokens = [*ALPHABET, *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("</s>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<two words>", normalized=False)])
    return backend


def sentencepiece(prefixed: bool = True) -> Tokenizer:
    """Ids: 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then letters and `▁h`, `▁he`, `▁▁`, `日`."""
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "▁")]
    singles = ["▁", "h", "e", "l", "o", "日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *singles, *map("".join, merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return backend


def metaspace() -> Tokenizer:
    backend = sentencepiece()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend
