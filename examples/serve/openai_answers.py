"""What OpenAI's API answers: whole texts, chunks of a stream, models."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from serve.interface import Stream


def usage(stream: Stream) -> dict[str, Any]:
    """How many tokens a request took; those found in the cache are told apart."""
    return {
        "prompt_tokens": stream.num_prompt_tokens,
        "completion_tokens": stream.num_new_tokens,
        "total_tokens": stream.num_prompt_tokens + stream.num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
    }


def model_object(name: str, created: int) -> dict[str, Any]:
    """A model, as /v1/models lists it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jax_kvblock",
    }


@dataclass(frozen=True)
class Shape:
    """How the answer to one request is written.

    Attributes:
        chat: whether it is a chat's; a completion's otherwise.
        model: the model's name.
        include_usage: a stream tells the usage in a last chunk, as OpenAI's option of
            this name says; other chunks have null.
    """

    chat: bool
    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: str, stream: Stream) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choice = {"message": {"role": "assistant", "content": text, "refusal": None}}
        if not self.chat:
            choice = {"text": text}
        return self._object("", [self._choice(choice, reason)], usage=usage(stream))

    def chunk(
        self, text: str, reason: str | None = None, *, first: bool = False
    ) -> dict[str, Any]:
        """A part of a stream; the first one of a chat has the role."""
        if not self.chat:
            return self._part([self._choice({"text": text}, reason)])
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        if reason is not None and not text:
            delta = {}
        return self._part([self._choice({"delta": delta}, reason)])

    def end(self, stream: Stream) -> dict[str, Any]:
        """The last chunk, if the usage was asked for."""
        return self._object(".chunk", [], usage=usage(stream))

    def _choice(self, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.include_usage else {}
        return self._object(".chunk", choices, **usage)

    def _object(self, suffix: str, choices: list, **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}",
            "object": f"chat.completion{suffix}" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }
