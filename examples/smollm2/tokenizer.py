"""The model's own tokenizer, rebuilt from the tokens and merges in its GGUF file."""

from collections.abc import Sequence

from gguf import GGUFReader
from serve import gguf_tokenizer
from serve.gguf_file import GGUFFile

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to token ids and back: byte-level BPE as in GPT-2, one token per digit.

    Example:
        >>> tokenizer = Tokenizer(reader)
        >>> tokenizer.decode(tokenizer.encode("KV blocks"))
        'KV blocks'
    """

    def __init__(self, reader: GGUFReader) -> None:
        self._tokens = gguf_tokenizer.of_gguf(GGUFFile(reader).field)
        (self.end_of_turn,) = self._tokens.end_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognized."""
        return self._tokens.encode(text)

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of a chat with one user message, up to where the answer begins."""
        turns = [("system", SYSTEM), ("user", message)]
        chat = "".join(f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in turns)
        return self.encode(chat + "<|im_start|>assistant\n")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokens.decode(ids)
