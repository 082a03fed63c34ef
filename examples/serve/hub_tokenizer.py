"""A model's own tokenizer, by the package `tokenizers`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve.chat import ChatTemplate, check_messages
from serve.config import UnknownModelError
from serve.safetensors_folder import read_json

# Of the template; transformers has them in `tokenizer_config.json`.
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class HubTokenizer:
    """A tokenizer of the package `tokenizers`, with what a model says about it.

    Args:
        tokens: the tokenizer.
        ends: the tokens that end a text.
        template: of chats; None where the model has none.
        special: texts that the template names.
        first: the token that begins a text where the tokenizer does not put it there.
    """

    def __init__(
        self,
        tokens: Any,
        ends: Sequence[int],
        template: str | None,
        special: Mapping[str, str],
        first: int | None = None,
    ) -> None:
        self._tokens = tokens
        self._template, self._special = template, special
        self._chat: ChatTemplate | None = None
        self._first = [] if first is None else [first]
        self.end_tokens = frozenset(ends)
        self.vocab_size: int = tokens.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognized."""
        return self._first + self._tokens.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokens.decode(list(ids))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the answer begins.

        Raises:
            ValueError: for messages that are wrong, or where there is no template.
            ModuleNotFoundError: where `minijinja` is not installed.
        """
        checked = check_messages(messages)
        if self._template is None:
            raise ValueError("encode_chat: this model has no template for chats")
        if self._chat is None:
            self._chat = ChatTemplate(self._template, self._special)
        text = self._chat.render(checked)
        return self._tokens.encode(text, add_special_tokens=False).ids


def of_folder(path: Path, config: Mapping[str, Any]) -> HubTokenizer:
    """The tokenizer beside the weights: `tokenizer.json` and what says more of it.

    Raises:
        FileNotFoundError: if `tokenizer.json` is missing.
        UnknownModelError: if a file says what it cannot.
    """
    tokens = read_tokenizer(path / "tokenizer.json")
    about = _read_if_there(path / "tokenizer_config.json")
    generation = _read_if_there(path / "generation_config.json")
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    if not all(i is None or type(i) is int for i in ends):
        raise UnknownModelError(
            f"eos_token_id must be a token's number, or a list of them, got {ends!r}"
        )
    template = about.get("chat_template")
    if isinstance(template, list):  # several, by name
        several = [each for each in template if isinstance(each, dict)]
        named = {each.get("name"): each.get("template") for each in several}
        template = named.get("default")
    _require_text("chat_template", template)
    apart = path / "chat_template.jinja"
    if apart.exists():
        template = apart.read_text(encoding="utf-8")
    special = {}
    for name in SPECIAL:
        found = about.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        _require_text(name, found)
        if found is not None:
            special[name] = found
    end = tokens.token_to_id(special.get("eos_token", ""))
    ends = {i for i in (*ends, end) if i is not None}
    return HubTokenizer(tokens, sorted(ends), template, special)


def read_tokenizer(path: Path) -> Any:
    """A `tokenizer.json`.

    Raises:
        FileNotFoundError: if there is none.
        ModuleNotFoundError: where `tokenizers` is not installed.
        UnknownModelError: if it is another file.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tokenizers turns text into tokens; pip install tokenizers"
        ) from error
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise UnknownModelError(f"{path} is no tokenizer: {error}") from None


def _require_text(name: str, got: Any) -> None:
    if got is not None and not isinstance(got, str):
        raise UnknownModelError(f"{name} must be a text, got {got!r}")


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
