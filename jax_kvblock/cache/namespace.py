"""Keys: 32 bytes that name what a block holds, the same in every process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.core import checks

FORMAT = 1  # of keys: another one finds nothing of this one's
Tokens: TypeAlias = "int | Iterable[int] | np.ndarray"


@dataclass(frozen=True)
class Namespace:
    """What keys start from: a model, and what its blocks are.

    Two caches share blocks where their namespaces are equal. The layout is no part of
    it, nor is how heads lie over devices.

    Args:
      model: the model's name, with its revision where weights may change.
      spec: what a block is.
      num_kv_heads: the model's KV heads, where `spec` is of a shard with fewer.

    Attributes:
      digest: 32 bytes.

    Raises:
      TypeError: when `model` is no string or `spec` no `BlockSpec`.
      ValueError: when `model` is empty, or `num_kv_heads` no multiple of the spec's.

    Example:
      >>> namespace = Namespace("SmolLM2-135M", manager.spec)
      >>> keys = namespace.keys(tokens, adapter="french")
    """

    model: str
    spec: BlockSpec
    num_kv_heads: int | None = None
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"Namespace: model must be a str, got {self.model!r}")
        if not self.model:
            raise ValueError("Namespace: model must not be empty; pass a name")
        if not isinstance(self.spec, BlockSpec):
            raise TypeError(f"Namespace: spec must be a BlockSpec, got {self.spec!r}")
        heads = self.spec.num_kv_heads
        if self.num_kv_heads is not None:
            whole = checks.check_integer(
                "Namespace", "num_kv_heads", self.num_kv_heads, "pass an int"
            )
            if whole < 1 or whole % heads:
                raise ValueError(
                    f"Namespace: num_kv_heads must be a multiple of the {heads} of "
                    f"spec, got {whole}"
                )
            heads = whole
        spec = self.spec
        lines = (
            f"jax_kvblock keys {FORMAT}",
            f"{spec.dtype.name} {spec.num_layers} {spec.num_outer} {spec.block_size} "
            f"{heads} {spec.head_dim}",
        )
        text = "".join(f"{line}\n" for line in lines).encode()
        digest = _native.blake3(text + _utf8("Namespace", "model", self.model))
        object.__setattr__(self, "digest", digest)

    @property
    def is_shard(self) -> bool:
        """Whether blocks have some of the model's KV heads, and not all."""
        return self.num_kv_heads not in (None, self.spec.num_kv_heads)

    def of_heads(self, heads: range) -> bytes:
        """What a `DiskTier` of one shard is opened with in place of `digest`, 32 bytes.

        Keys are those of all shards: what is kept by them alone is not told apart.

        Args:
          heads: which of the model's KV heads a block has.

        Raises:
          TypeError, ValueError: when they are no such range.
        """
        own, whole = self.spec.num_kv_heads, self.num_kv_heads or self.spec.num_kv_heads
        if not isinstance(heads, range):
            raise TypeError(
                f"of_heads: heads must be a range, got {heads!r}; range({own}) are the "
                "first ones"
            )
        fits = heads.step == 1 and heads.start >= 0 and heads.stop <= whole
        if not fits or len(heads) != own:
            raise ValueError(
                f"of_heads: heads must be {own} in a row of {whole}, got {heads!r}; "
                f"range({own}) are the first ones"
            )
        return _native.blake3(f"heads {heads.start}".encode(), self.digest)

    def root(self, adapter: str | None = None, salt: str | bytes = b"") -> bytes:
        """What the keys of a sequence start from, 32 bytes.

        Args:
          adapter: the name of an adapter (LoRA) that changes keys and values.
          salt: whatever else tells sequences apart, such as a tenant.
        """
        if adapter is not None and not isinstance(adapter, str):
            raise TypeError(f"root: adapter must be a str or None, got {adapter!r}")
        if not isinstance(salt, (str, bytes)):
            raise TypeError(f"root: salt must be a str or bytes, got {salt!r}")
        parts = (
            b"" if adapter is None else b"=" + _utf8("root", "adapter", adapter),
            _utf8("root", "salt", salt) if isinstance(salt, str) else salt,
        )
        message = b"".join(len(x).to_bytes(8, "little") + x for x in parts)
        return _native.blake3(message, self.digest)

    def keys(
        self,
        tokens: Tokens,
        *,
        adapter: str | None = None,
        salt: str | bytes = b"",
    ) -> list[bytes]:
        """The keys of the full blocks of a sequence, 32 bytes each.

        Args:
          tokens: of the sequence from its first one, integers of 32 bits.
          adapter, salt: as for `root`.
        """
        numbers = token_array("keys", tokens)
        size = self.spec.block_size
        return _native.chain_keys(self.root(adapter, salt), numbers, size)


def _utf8(where: str, name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where}: {name} must be text that UTF-8 has bytes for, got {text!r} with "
            "half of a surrogate pair; pass whole characters"
        ) from None


def token_array(where: str, tokens: Tokens) -> np.ndarray:
    """Tokens as contiguous int32 `[n]`."""
    if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    if type(tokens) is int:
        tokens = [tokens]
    if isinstance(tokens, (str, bytes)):
        raise TypeError(
            f"{where}: tokens must be integers, got {type(tokens).__name__}"
        )
    if isinstance(tokens, Iterable) and not hasattr(tokens, "__array__"):
        tokens = list(tokens)
        plain = _native.tokens_of(tokens)  # a third of NumPy's time
        if plain is not None:
            return plain
    try:
        numbers = np.atleast_1d(np.asarray(tokens))
    except ValueError:  # rows that are not of one length
        raise ValueError(
            f"{where}: tokens must be a number or one sequence, got sequences of "
            "several lengths; open a table for each sequence"
        ) from None
    if not numbers.size:
        return np.zeros(0, np.int32)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(
            f"{where}: tokens must be integers, got an array of {numbers.dtype}"
        )
    if numbers.ndim != 1:
        raise ValueError(
            f"{where}: tokens must be a number or one sequence, got shape "
            f"{numbers.shape}; open a table for each sequence"
        )
    bounds = np.iinfo(np.int32)
    if numbers.min() < bounds.min or numbers.max() > bounds.max:
        raise ValueError(f"{where}: tokens must fit 32 bits")
    return np.ascontiguousarray(numbers, np.int32)
