"""One device's part: what its rows see of the keys that are here, as calls."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import primitive
from jax_kvblock.attention.config import OPEN, AttentionConfig, Operands
from jax_kvblock.attention.ops import LogSumExp
from jax_kvblock.parallel import axes
from jax_kvblock.parallel.pieces import (
    Boxes,
    Call,
    Side,
    boxes,
    call_of,
    contiguous_side,
    zigzag_side,
)

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in.

    Attributes:
      config: scale, windows, softcap and so on.
      axis_name: the mesh axis, or axes.
      size: devices of a ring.
      group: how many rings lie side by side: device d is in ring `d % group`, at place
        `d // group`.
      zigzag: how sequences lie.
      gathered: whether keys are gathered, instead of coming by.
      direct: whether devices then send them to each other, instead of a collective's
        gathering them, where calls on own keys and on others' are apart.
      packed: whether arrays hold packed documents.
      alike: whether queries and keys have the same positions on every device.
      as_one: whether keys and values travel as one array.
      beside_nccl: whether what travels takes multiprocessors.
      longest: the rows of the longest packed document of contiguous rows; OPEN where
        that is not known.
    """

    config: AttentionConfig
    axis_name: Any
    size: int
    group: int
    zigzag: bool
    gathered: bool
    direct: bool
    packed: bool
    alike: bool
    as_one: bool
    beside_nccl: bool
    longest: int = OPEN


class Mask(NamedTuple):
    """The integers of a call; None where absent.

    q_segments, kv_segments: `[B, T]`, `[B, S]`, of this device's rows. q_lens, kv_lens:
    of whole sequences. cu_q, cu_kv: boundaries in the rows of all devices together.
    dropout_keys: uint32 `[B, N, 2]`, of whole sequences.
    """

    q_segments: Any = None
    kv_segments: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    cu_q: Any = None
    cu_kv: Any = None
    dropout_keys: Any = None


class Here:
    """A ring as one device sees it: the sides of its calls, and how arrays travel."""

    def __init__(self, plan: Plan, mask: Mask, q: jax.Array, k: jax.Array) -> None:
        self.plan, self.mask = plan, mask
        self._batch = 1 if plan.packed else q.shape[0]
        self.key_length = k.shape[-3]
        self.place = axes.index(plan.axis_name) // plan.group
        self.q = self._side(q.shape[-3], self.place, mask.cu_q, mask.q_lens)

    def _side(self, length: int, place: Any, bounds: Any, lens: Any) -> Side:
        plan = self.plan
        side = zigzag_side if plan.zigzag and plan.size > 1 else contiguous_side
        starts = self._starts(length, bounds)
        return side(
            length, plan.size, place, starts, lens,
            packed=plan.packed, alike=plan.alike,
        )  # fmt: skip

    def _starts(self, length: int, bounds: Any) -> Any:
        """Packed, the boundaries of documents; else the first rows of a batch."""
        if self.plan.packed:
            return bounds
        return jnp.arange(self._batch + 1, dtype=jnp.int32) * length

    def keys(self, step: int) -> Side:
        """Of the device `step` places before this one."""
        place = (self.place - step) % self.plan.size
        mask = self.mask
        return self._side(self.key_length, place, mask.cu_kv, mask.kv_lens)

    def all_keys(self) -> Side:
        """Of all devices, in the order of the sequence."""
        length = self.key_length * self.plan.size
        starts = self._starts(length, self.mask.cu_kv)
        return contiguous_side(
            length, 1, jnp.int32(0), starts, self.mask.kv_lens,
            packed=self.plan.packed, alike=self.plan.alike,
        )  # fmt: skip

    def boxes(self, k: Side, step: int) -> list[Boxes]:
        """What rows see of the keys of step `step`, call by call."""
        plan = self.plan
        found = boxes(
            plan.config,
            self.q,
            k,
            alike=plan.alike,
            size=plan.size,
            step=step,
            late=self.place < step,
            joined=self.mask.q_segments is None,
            longest=plan.longest,
        )
        return list(found)

    def call(self, k: Side, found: Boxes, key_ids: Any) -> Call:
        ids = None if key_ids is None else (self.mask.q_segments, key_ids)
        config, packed = self.plan.config, self.plan.packed
        dropped = self.mask.dropout_keys
        return call_of(config, self.q, k, found, ids, dropped, packed=packed)

    def calls(self, k: Side, step: int, key_ids: Any) -> list[Call]:
        return [self.call(k, found, key_ids) for found in self.boxes(k, step)]

    def own_calls(self) -> list[Call]:
        """What rows see of this device's own keys, while others' travel."""
        made = self.calls(self.keys(0), 0, self.mask.kv_segments)
        if self.plan.size == 1 or not self.plan.beside_nccl:
            return made
        return [
            call._replace(config=dataclasses.replace(call.config, shares_gpu=True))
            for call in made
        ]

    def visible(self) -> dict[int, int]:
        """How many calls the steps have at which some device sees something."""
        counts = {s: len(self.boxes(self.keys(s), s)) for s in range(self.plan.size)}
        return {step: count for step, count in counts.items() if count}

    def send(self, arrays: Any, by: int) -> Any:
        """To the device `by` places on; what the one `by` places before has comes."""
        plan = self.plan
        return jax.tree.map(
            lambda a: axes.send(a, plan.axis_name, plan.size, plan.group, by), arrays
        )


# ---- a call --------------------------------------------------------------------------


def forward_call(call: Call, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
    """out `[B, T, N, Dv]` and lse `[B, N, T]`; of packed arrays without B.

    Rows outside of the call's box have zeros and −inf.
    """
    o, lse = primitive.forward(call.config, _operands(call, (q, k, v)))
    return _as_rows(call, q.shape[:-2], o, lse.value)


def joined_call(
    call: Call, x: Arrays, o: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """out and lse of this call and of those before, from out and lse of these.

    Rows outside of the call's box keep them.
    """
    o, lse = primitive.joined(
        call.config, _operands(call, x), _flat(call, o), _flat_rows(call, lse)
    )
    return _as_rows(call, x[0].shape[:-2], o, lse)


def backward_call(
    call: Call, x: Arrays, lse: jax.Array, delta: jax.Array, d_o: jax.Array,
    dq: jax.Array | None = None,
) -> Arrays:  # fmt: skip
    """The call's part of dq, dk and dv, in their arrays' shapes and dtypes.

    dq: that of the calls before, which this one's is added to.
    """
    lse, delta = (_flat_rows(call, a) for a in (lse, delta))
    made = primitive.backward(
        call.config,
        _operands(call, x),
        LogSumExp(lse),
        delta,
        _flat(call, d_o),
        None if dq is None else _flat(call, dq),
    )
    return tuple(g.reshape(a.shape) for g, a in zip(made, x, strict=True))


def _operands(call: Call, x: Arrays) -> Operands:
    q, k, v = (_flat(call, a) for a in x)
    return call.mask._replace(q=q, k=k, v=v)


def _flat(call: Call, a: jax.Array) -> jax.Array:
    """`[B, T, N, D]` as `[B T, N, D]` where the call is packed."""
    return a.reshape(-1, *a.shape[-2:]) if call.packed else a


def _flat_rows(call: Call, a: jax.Array) -> jax.Array:
    """`[B, N, T]` as `[N, B T]` where the call is packed."""
    if not call.packed or a.ndim == 2:
        return a
    return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1)


def _as_rows(
    call: Call, rows: tuple[int, ...], o: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o and lse as they lie for the caller, whose rows are `(B, T)` or `(T,)`."""
    o = o.reshape(*rows, *o.shape[-2:])
    if call.packed and len(rows) == 2:
        return o, jnp.swapaxes(lse.reshape(-1, *rows), 0, 1)
    return o, lse
