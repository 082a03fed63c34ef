"""Batches of events as the bytes that vLLM sends: MessagePack, by msgspec.

A batch is an array: timestamp, events, rank. An event is a map of its fields with its
name under "type"; until June 2026 (vLLM's pull request 42892) it was an array that
began with its name. Readers of one form do not read the other.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from jax_kvblock.cache.event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)

Form = Literal["maps", "arrays"]
Hashes = Literal["bytes", "int"]

# Of each event: the fields that readers expect, nil or not, and those that a map leaves
# out where they are nil.
_FIELDS = {
    BlockStored: (
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
        ),
        (
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
    ),
    BlockRemoved: (("block_hashes", "medium"), ("group_idx",)),
    AllBlocksCleared: ((), ()),
}


class BatchEncoder:
    """Writes batches as bytes.

    Args:
      form: of events, "maps" as vLLM sends them now, "arrays" for readers of versions
        before.
      hashes: keys as "bytes", whole, or as "int": their last 8 bytes as an unsigned
        number, which is what vLLM sends unless it is told otherwise.

    Example:
      >>> payload = BatchEncoder().encode(batch)
    """

    def __init__(self, form: Form = "maps", hashes: Hashes = "bytes") -> None:
        for name, value, known in (("form", form, Form), ("hashes", hashes, Hashes)):
            if value not in get_args(known):
                raise ValueError(
                    f"BatchEncoder: {name} must be one of {get_args(known)}, got "
                    f"{value!r}"
                )
        try:
            import msgspec
        except ImportError as error:
            raise ImportError(
                "BatchEncoder: events are written by msgspec, which is not installed; "
                "`pip install msgspec`"
            ) from error
        self._pack = msgspec.msgpack.Encoder().encode
        self._maps = form == "maps"
        self._whole = hashes == "bytes"

    def encode(self, batch: EventBatch) -> bytes:
        events = [self._event(event) for event in batch.events]
        return self._pack([batch.timestamp, events, batch.rank])

    def _event(self, event: Event) -> dict[str, Any] | list[Any]:
        name = type(event).__name__
        needed, others = _FIELDS[type(event)]
        values = {field: self._value(event, field) for field in (*needed, *others)}
        if not self._maps:
            return [name, *values.values()]
        told = {k: v for k, v in values.items() if v is not None or k in needed}
        return {"type": name, **told}

    def _value(self, event: Event, field: str) -> Any:
        if field == "kv_cache_spec_kind":
            return _kind(event)
        value: Any = getattr(event, field, None)
        if value is None:
            return None
        if field == "block_hashes":
            return [self._hash(key) for key in value]
        if field == "parent_block_hash":
            return self._hash(value)
        return value.tolist() if field == "token_ids" else value

    def _hash(self, key: bytes) -> bytes | int:
        return key if self._whole else int.from_bytes(key[-8:], "big")


def _kind(event: Event) -> str | None:
    """Groups are told apart by their kind; a cache without groups has none."""
    if not isinstance(event, BlockStored) or event.group_idx is None:
        return None
    windowed = event.kv_cache_spec_sliding_window is not None
    return "sliding_window" if windowed else "full_attention"
