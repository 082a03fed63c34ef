"""Whether a store can hold a cache's blocks, before anything is put there."""

from __future__ import annotations

from typing import Any

from jax_kvblock.cache.namespace import Namespace


def check_store(where: str, store: Any, namespace: Namespace) -> None:
    """Whether a store has what `Store` asks for, and room for blocks like these.

    What a store tells of itself is looked at: `block_bytes`, `namespace` and `heads`,
    as `DiskTier` and the connectors have them. Keys are the same for all shards of a
    model, so a shard's store has to tell whose heads it holds.

    Raises:
      TypeError: it lacks a method.
      ValueError: its blocks are of another size or model, or of a shard, and it does
        not tell of which.
    """
    calls = ("has", "put", "get") if getattr(store, "takes", True) else ("has", "get")
    lacks = [name for name in calls if not callable(getattr(store, name, None))]
    if lacks:
        raise TypeError(
            f"{where}: store must have {', '.join(calls)}, got "
            f"{type(store).__name__} without {', '.join(lacks)}; pass a DiskTier or a "
            "connector"
        )
    size = getattr(store, "block_bytes", None)
    if size is not None and size != namespace.spec.block_bytes:
        raise ValueError(
            f"{where}: store must hold blocks of {namespace.spec.block_bytes} bytes, "
            f"got one of {size}; open it with block_bytes=manager.spec.block_bytes"
        )
    of = getattr(store, "namespace", None)
    digest = of.digest if isinstance(of, Namespace) else of
    own, whole = namespace.spec.num_kv_heads, namespace.num_kv_heads
    parts: list[bytes] = []
    if namespace.is_shard and whole is not None:
        firsts = range(whole - own + 1)
        parts = [namespace.of_heads(range(i, i + own)) for i in firsts]
    if isinstance(digest, bytes) and digest not in (namespace.digest, *parts):
        got = repr(of.model) if isinstance(of, Namespace) else "another one"
        raise ValueError(
            f"{where}: store must be of the cache's namespace, {namespace.model!r}, "
            f"got {got}; open a connector with namespace=cache.namespace, a DiskTier "
            "with namespace=cache.namespace.digest"
        )
    if not namespace.is_shard or getattr(store, "heads", None) is not None:
        return
    if digest in parts:
        return
    raise ValueError(
        f"{where}: store must tell which {own} of the model's {whole} KV heads it "
        "holds, since keys are the same for all of them; pass a "
        "DiskConnector(heads=range(first, end)), or a DiskTier with "
        "namespace=cache.namespace.of_heads(range(first, end)), or give a store of "
        "your own an attribute heads"
    )
