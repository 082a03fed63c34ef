"""What OpenAI's API asks for, read and checked: bodies, fields, errors.

    asked = read(body, ChatRequest)
    request = asked.request(prompt, room=engine.max_tokens - len(prompt))

Fields that only describe a request are taken and do nothing. Those that would change
the answer in a way that no engine here knows are refused, unless they ask for what
happens anyway. Others are unknown.
"""

import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from serve.interface import Message, Request, Tokenizer


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form.

    Attributes:
        status: of HTTP.
        message: what was expected, what came, and what to do.
        kind: OpenAI's `type`.
        param: the field that is wrong.
        code: for programs.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        told = {"message": self.message, "type": self.kind}
        return {"error": {**told, "param": self.param, "code": self.code}}


# ---- requests ------------------------------------------------------------------------

StopText = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    """How a stream ends: with a chunk that has the usage, or without."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect


class Asked(Struct, kw_only=True):
    """What both kinds of requests share. `top_k` and `ignore_eos` are vLLM's."""

    model: str
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    def most_tokens(self, room: int) -> int:
        """How many tokens may follow a prompt that leaves `room` of them."""
        raise NotImplementedError

    def request(self, prompt: Seq[int], room: int) -> Request:
        """The request for an engine, with OpenAI's defaults."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Request(
            prompt=prompt,
            max_new_tokens=self.most_tokens(room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=stop,
            ignore_end=bool(self.ignore_eos),
        )


class CompletionRequest(Asked, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]

    def most_tokens(self, room: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not _is_int(prompt[0]):
            prompt = prompt[0]  # one prompt, as a list of them
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt)
        if not all(_is_int(token) for token in prompt):
            message = "prompt: one text, or the token ids of one, got a list of prompts"
            raise ApiError(400, message, param="prompt", code="unsupported_value")
        if not prompt:
            message = "prompt: at least one token, got none"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return prompt


class Part(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Struct):
    """A turn of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(Asked, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None

    def most_tokens(self, room: int) -> int:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            message = "max_completion_tokens: differs from max_tokens; pass one of them"
            where = "max_completion_tokens"
            raise ApiError(400, message, param=where, code="invalid_value")
        return given.pop() if given else max(room, 1)

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the chat, up to where the answer begins."""
        turns = [_turn(f"messages[{i}]", m) for i, m in enumerate(self.messages)]
        try:
            return tokenizer.encode_chat(turns)
        except ValueError as error:
            message = f"messages: {error}"
            code = "invalid_value"
            raise ApiError(400, message, param="messages", code=code) from error


# As OpenAI's API names them, and as templates do.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def _turn(where: str, message: ChatMessage) -> Message:
    """A message as tokenizers take it: a role, and one text."""
    if message.role not in ROLES:
        text = f"{where}.role: one of {', '.join(ROLES)}, got {in_words(message.role)}"
        raise ApiError(400, text, param=f"{where}.role", code="invalid_value")
    if message.tool_calls:
        text = f"{where}.tool_calls: tools are not supported; leave them out"
        code = "unsupported_parameter"
        raise ApiError(400, text, param=f"{where}.tool_calls", code=code)
    if message.content is None:
        text = f"{where}.content: a text, got null"
        raise ApiError(400, text, param=f"{where}.content", code="invalid_type")
    if isinstance(message.content, str):
        return Message(role=ROLES[message.role], content=message.content)
    for i, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            param = f"{where}.content[{i}]"
            text = f"{param}: only parts of type 'text' are supported, with a text"
            raise ApiError(400, text, param=param, code="unsupported_value")
    text = "".join(part.text or "" for part in message.content)
    return Message(role=ROLES[message.role], content=text)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- reading -------------------------------------------------------------------------

MOST_SHOWN = 40  # characters of what came, in messages

# What these fields may be: they ask for what happens anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
}
# They say who asks and why, or how the answer is kept elsewhere.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "verbosity"),
}

AskedType = TypeVar("AskedType", bound=Asked)


def read(body: bytes, kind: type[AskedType]) -> AskedType:
    """A request's body, checked.

    Raises:
        ApiError: 400, with what is wrong and where.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"The body must be JSON in UTF-8: {error}"
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(data, dict):
        message = f"The body must be a JSON object, got {in_words(data)}"
        raise ApiError(400, message, code="invalid_type")
    _check_names(data, kind)
    try:
        asked = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), data) from error
    if asked.stream_options is not None and not asked.stream:
        message = "stream_options: only with stream: true"
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    return asked


def _check_names(data: dict[str, Any], kind: type[Asked]) -> None:
    known = {*kind.__struct_fields__, *WITHOUT_EFFECT}
    for name, value in data.items():
        if name in NEUTRAL:
            allowed = NEUTRAL[name]
            if not any(value == v and type(value) is type(v) for v in allowed):
                options = " or ".join(repr(v) for v in allowed if v is not None)
                fix = f"; it may be {options}" if options else ""
                message = f"{name}: not supported here; leave it out{fix}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        elif name not in known:
            shown = name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}…"
            message = f"{shown}: unknown; leave it out"
            raise ApiError(400, message, param=shown, code="unknown_parameter")


def _explained(text: str, data: dict[str, Any]) -> ApiError:
    """msgspec's message as ours: the field first, and what came."""
    reason, _, path = text.partition(" - at `$")
    reason = reason[0].lower() + reason[1:]
    param = path.rstrip("`").removeprefix(".") or None
    missing = re.search(r"missing required field `(\w+)`", reason)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        message, code = f"{param}: missing; pass it", "missing_required_parameter"
    elif ", got" in reason:
        message, code = f"{param}: {reason}", "invalid_type"
    else:
        value = _at(data, param or "")
        message, code = f"{param}: {reason}, got {in_words(value)}", "invalid_value"
    return ApiError(400, message, param=param, code=code)


def _at(data: Any, path: str) -> Any:
    """What lies at a path such as `messages[0].role`."""
    for name, index in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", path):
        data = data[name] if name else data[int(index)]
    return data


def in_words(value: Any) -> str:
    """What came, shortened."""
    if isinstance(value, list | dict):
        kind = "an array" if isinstance(value, list) else "an object"
        return f"{kind} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
