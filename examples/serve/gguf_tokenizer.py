"""The tokenizer in a GGUF file: its tokens, their kinds and scores, or its merges."""

from collections.abc import Callable
from typing import Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from serve.config import UnknownModelError
from serve.hub_tokenizer import HubTokenizer

# What a text is cut into before pairs are merged, by `tokenizer.ggml.pre`. The patterns
# are those of the models' own `tokenizer.json`.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": _WORDS.replace("DIGITS", "{1,3}"),
    "qwen2": _WORDS.replace("DIGITS", ""),
}
GPT2 = ("default", "gpt-2")
DIGITS = ("smollm",)  # as GPT-2, but each digit is a token
# Ends of a turn, in `tokenizer.ggml.<name>_token_id`.
ENDS = ("eos", "eot", "eom")


def of_gguf(field: Callable[..., Any]) -> HubTokenizer:
    """The tokenizer.

    Args:
        field: (name, default) -> a field of the file.

    Raises:
        UnknownModelError: for a kind that is not known.
    """

    def own(name: str, *default: Any) -> Any:
        return field(f"tokenizer.ggml.{name}", *default)

    kind, texts, kinds = own("model"), own("tokens"), own("token_type")
    vocab = {text: index for index, text in enumerate(texts)}
    if kind == "gpt2":
        built = _byte_level(vocab, own("merges"), own("pre", "default"))
        with_first = own("pre", "default") == "llama-bpe"
    elif kind == "llama":
        built = _sentence_pieces(vocab, own("scores"), own("add_space_prefix", True))
        with_first = True
    else:
        raise UnknownModelError(
            f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}"
        )
    built.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(texts, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    first = own("bos_token_id", None) if own("add_bos_token", with_first) else None
    ends = {own(f"{name}_token_id", None) for name in ENDS} - {None}
    special = {
        f"{name}_token": texts[own(f"{name}_token_id")]
        for name in ("bos", "eos")
        if own(f"{name}_token_id", None) is not None
    }
    template = field("tokenizer.chat_template", None)
    return HubTokenizer(built, sorted(ends), template, special, first)


def _byte_level(vocab: dict[str, int], merges: list[str], pre: str) -> Tokenizer:
    """Pairs of bytes, merged in order (GPT-2)."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    whole_words = pre == "llama-bpe"
    built = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in PATTERNS:
        words = pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    elif pre in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        built.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif pre in GPT2:
        built.pre_tokenizer = plain
    else:
        known = ", ".join((*PATTERNS, *DIGITS, *GPT2))
        raise UnknownModelError(
            f"tokenizer.ggml.pre must be one of {known}, got {pre!r}; load the model "
            "from a folder with its tokenizer.json"
        )
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_pieces(
    vocab: dict[str, int], scores: list[float], space_first: bool
) -> Tokenizer:
    """SentencePiece's pairs: the pair goes first whose token has the highest score."""
    by_score = []
    for token, index in vocab.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocab and right in vocab:
                by_score.append(
                    (-scores[index], vocab[left], vocab[right], left, right)
                )
    pairs = [(left, right) for *_, left, right in sorted(by_score)]
    built = Tokenizer(
        models.BPE(
            vocab=vocab, merges=pairs, byte_fallback=True, fuse_unk=True, unk_token=None
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    before = [normalizers.Prepend("▁")] if space_first else []
    built.normalizer = normalizers.Sequence([*before, spaces])
    built.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if space_first else []),
        ]
    )
    return built
