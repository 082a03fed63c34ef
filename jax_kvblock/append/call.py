"""A call of the append primitive: what is compiled in, and its operands by name.

Axes have letters: t tokens, N query heads, J the heads of queries, keys and values; of
the pool B blocks, L layers, O outer (K and V), T tokens in a block, H KV heads, D head
dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jax_kvblock.blocks.plan import Side

# Every operand, in the order in which a call has those that it has. "pool" stands for
# the pool's arrays; "qkv" for q, k and v in one. Mirrored in append_ffi.cc.
NAMES = (
    "qkv",
    "q",
    "k",
    "v",
    "pool",
    "k_scales",
    "v_scales",
    "slots",
    "positions",
    "layer",
    "inv_freq",
    "cos_sin",
    "q_norm",
    "k_norm",
    "k_scale",
    "v_scale",
)
# What comes out, in this order; but for q each is its operand, updated in place.
UPDATED = ("pool", "k_scales", "v_scales")
RESULTS = ("q", *UPDATED)


@dataclasses.dataclass(frozen=True)
class Append:
    """What is compiled in.

    Attributes:
      name: the function that was called, for messages.
      pool: how the pool's arrays lie; slots address its blocks and tokens.
      num_layers: of the pool, whose side may be one layer's.
      layer: the layer that is written, 0 where it is traced or there are all of them.
      all_layers: k and v are `[L, t, H, D]`, for every layer.
      present: the operands, by name.
      rotary_dim: how many of the D elements turn, from the first on; 0 for none.
      interleaved: neighbours turn together, not element i and i + rotary_dim / 2.
      norm_eps: of the RMS norms.
      zero_tail: a block that gets its first token has zeros where no token is.
      implementation: "cuda", "xla" or None.
    """

    name: str
    pool: Side
    num_layers: int
    layer: int
    all_layers: bool
    present: tuple[str, ...]
    rotary_dim: int = 0
    interleaved: bool = False
    norm_eps: float = 1e-6
    zero_tail: bool = False
    implementation: str | None = None

    @classmethod
    def pack(cls, arrays: Mapping[str, Any], **static: Any) -> tuple[Append, list[Any]]:
        """A call of these operands, of which some are None, and the others in order."""
        present = tuple(n for n in NAMES if arrays.get(n) is not None)
        flat: list[Any] = []
        for name in present:
            flat += arrays[name] if name == "pool" else [arrays[name]]
        return cls(present=present, **static), flat

    @property
    def operand_names(self) -> list[str]:
        """The name of each operand; "pool" as often as the pool has arrays."""
        arrays = self.pool.num_arrays
        return [n for n in self.present for _ in range(arrays if n == "pool" else 1)]

    @property
    def joined(self) -> bool:
        """q, k and v come as one array `[t, J, D]`, J = N + 2 H."""
        return "qkv" in self.present

    @property
    def results(self) -> list[tuple[str, int]]:
        """Each result: its name, and which operand has its dtype and, but for q that is
        joined, its shape."""
        operands = list(enumerate(self.operand_names))
        of = {"qkv": "q"}
        return [(r, i) for r in RESULTS for i, n in operands if of.get(n, n) == r]

    @property
    def result_names(self) -> list[str]:
        """The name of each result."""
        return [name for name, _ in self.results]

    def queries(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of q, given that of q or of the joined array."""
        tokens, heads, dim = shape
        return tokens, heads - 2 * self.extents["H"] * self.joined, dim

    def apart(self, operands: Sequence[Any]) -> tuple[Append, tuple[Any, ...]]:
        """The same call with q, k and v as arrays of their own."""
        x = self.unpack(operands)
        qkv = x.pop("qkv")
        heads, kv_heads = self.queries(qkv.shape)[1], self.extents["H"]
        parts = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
        static = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del static["present"]
        x |= dict(zip("qkv", parts, strict=True))
        call, flat = Append.pack(x, **static)
        return call, tuple(flat)

    def unpack(self, operands: Sequence[Any]) -> dict[str, Any]:
        """The operands by name, the pool's as a list."""
        found: dict[str, Any] = {"pool": []}
        for name, x in zip(self.operand_names, operands, strict=True):
            if name == "pool":
                found["pool"].append(x)
            else:
                found[name] = x
        return found

    def axes(self, name: str, ndim: int) -> tuple[tuple[str, ...], ...]:
        """The axes of each dimension of an operand, or of a result."""
        if name == "pool":
            return self.pool.form.array
        letters = {
            "qkv": "tJD",
            "q": "tND",
            "k": "LtHD",
            "v": "LtHD",
            "k_scales": "LBTH",
            "v_scales": "LBTH",
            "slots": "t",
            "positions": "t",
            "k_scale": "H",
            "v_scale": "H",
        }.get(name, "")
        # Layers come first, where there are any; a dimension without a letter is "".
        letters = letters[len(letters) - ndim :] if letters else " " * ndim
        return tuple((letter.strip(),) for letter in letters)

    @property
    def extents(self) -> dict[str, int]:
        """The sizes of the pool's axes."""
        return dict(self.pool.sizes) | {"L": self.num_layers}

    @property
    def num_outer(self) -> int:
        return 2 if self.joined or "v" in self.present else 1


NORMS = ("q_norm", "k_norm")
