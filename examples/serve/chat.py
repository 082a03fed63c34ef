"""Chats as text, by the template that a model comes with."""

import datetime
from collections.abc import Mapping, Sequence

from serve.interface import Message


class ChatTemplate:
    """A Jinja template of `tokenizer_config.json` or a GGUF file.

    Args:
        source: the template.
        special: texts that templates name, such as "bos_token".

    Raises:
        ModuleNotFoundError: where `minijinja` is not installed.

    Example:
        >>> ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        try:
            import minijinja
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "minijinja renders the templates of chats; pip install minijinja"
            ) from error
        self._error = minijinja.TemplateError
        self._environment = minijinja.Environment(
            templates={"chat": source}, trim_blocks=True, lstrip_blocks=True
        )
        self._environment.add_global("raise_exception", _refuse)
        self._environment.add_global("strftime_now", _now)
        self._special = dict(special)

    def render(self, messages: Sequence[Message]) -> str:
        """The chat's text, up to where the answer begins.

        Raises:
            ValueError: if the template refuses the messages; it says why.
        """
        try:
            return self._environment.render_template(
                "chat", messages=messages, add_generation_prompt=True, **self._special
            )
        except (self._error, ValueError) as error:
            raise ValueError(f"the chat's template refuses it: {error}") from None


def check_messages(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    """The messages, if they are some.

    Raises:
        ValueError: for no messages, or one without a text for its role and content.
    """
    if not messages:
        raise ValueError("encode_chat: there must be a message, got none")
    for message in messages:
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(
                    f"encode_chat: {name} of a message must be a text, got "
                    f"{message.get(name)!r}"
                )
    return [Message(role=m["role"], content=m["content"]) for m in messages]


def _refuse(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
