"""The model's own tokenizer, rebuilt from the tokens and merges in its GGUF file."""

from collections.abc import Sequence

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BytePairs

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to token ids and back: byte-level BPE as in GPT-2, one token per digit.

    Example:
        >>> tokenizer = Tokenizer(reader)
        >>> tokenizer.decode(tokenizer.encode("KV blocks"))
        'KV blocks'
    """

    def __init__(self, reader: GGUFReader) -> None:
        def field(name: str) -> list:
            return reader.fields[f"tokenizer.ggml.{name}"].contents()

        tokens, kinds = field("tokens"), field("token_type")
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in field("merges")]
        pairs = BytePairs(models.BPE(vocab=vocab, merges=merges))
        pairs.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        pairs.decoder = decoders.ByteLevel()
        pairs.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == TokenType.CONTROL
            ]
        )
        self._pairs = pairs
        self.end_of_turn: int = vocab["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognized."""
        return self._pairs.encode(text).ids

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of a chat with one user message, up to where the answer begins."""
        turns = [("system", SYSTEM), ("user", message)]
        chat = "".join(f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in turns)
        return self.encode(chat + "<|im_start|>assistant\n")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._pairs.decode(list(ids))
