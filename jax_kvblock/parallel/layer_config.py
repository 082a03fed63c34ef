"""What an attention layer is: `AttentionConfig`, and its checks."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.numpy as jnp

from jax_kvblock.attention.arguments import (
    check_flags,
    check_scale,
    check_softcap,
    finite,
)
from jax_kvblock.attention.cuda import MAX_HEAD_DIM
from jax_kvblock.attention.dispatch import IMPLEMENTATIONS
from jax_kvblock.attention.dropout import threshold_of
from jax_kvblock.attention.qkv import BATCHED
from jax_kvblock.core.checks import check_choice, check_dtype, check_positive
from jax_kvblock.parallel import axes
from jax_kvblock.parallel.arguments import check_degree_of
from jax_kvblock.parallel.sequence import LAYOUTS, SequenceLayout
from jax_kvblock.parallel.strategy import STRATEGIES, Strategy

if TYPE_CHECKING:
    Axes: TypeAlias = str | tuple[str, ...]

# What an attention layer computes in.
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Fields of `AttentionConfig` that name mesh axes.
AXES = ("axis_name", "batch_axis", "head_axis")


class AttentionPatterns(enum.Enum):
    """Who attends to whom, and where the sequence lies."""

    FULL = "full"
    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding_window"
    RING = "ring"
    CONTEXT_PARALLEL = "context_parallel"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What an attention layer is.

    Attributes:
      d_model: the width of what goes in and comes out.
      num_heads: query heads, which divide d_model: into head dims that are multiples
        of 8, up to 256.
      num_kv_heads: key heads, which divide num_heads; as many unless given.
      pattern: FULL, CAUSAL and SLIDING_WINDOW run on one device, or cut by batch and
        heads as jit's shardings say. RING and CONTEXT_PARALLEL have the sequence cut
        over a mesh axis.
      causal: of RING and CONTEXT_PARALLEL. CAUSAL and SLIDING_WINDOW are.
      window: how many keys before its own position a query sees; None for all.
      softcap, scale, deterministic, implementation: as in `flash_attention`.
      strategy, ulysses_degree, layout: as in `context_parallel_attention`. In layout
        "zigzag" what goes in is laid out by `to_zigzag`, and so is what comes out. RING
        has no strategy but "ring".
      axis_name: the mesh axis that sequences are cut over, or axes, in the mesh's
        order.
      batch_axis, head_axis: mesh axes that the batch and the heads are cut over, or
        None.
      compiler_options: as in `context_parallel_attention`.
      dropout: the share of the probabilities that become 0 in calls that are given a
        `dropout_seed`, as `dropout_rate` in `flash_attention`.
      max_sequence_length: longer sequences are an error.
      dtype: of the weights and of the attention: bfloat16, float16 or float32.

    Raises:
      TypeError, ValueError: sizes that do not fit, like heads that do not divide
        d_model, or a head dim that attention does not serve; a dtype or an option that
        no layer has.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    pattern: AttentionPatterns = AttentionPatterns.FULL
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    implementation: str | None = None
    strategy: Strategy = "auto"
    ulysses_degree: int | None = None
    layout: SequenceLayout = "contiguous"
    axis_name: Axes = "context"
    batch_axis: Axes | None = None
    head_axis: Axes | None = None
    compiler_options: bool = False
    max_sequence_length: int | None = None
    dtype: Any = jnp.float32
    dropout: float = 0.0
    deterministic: bool = False

    def __post_init__(self) -> None:
        where = "AttentionConfig"
        check_positive(where, d_model=self.d_model, num_heads=self.num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"{where}: d_model must be a multiple of num_heads, got {self.d_model} "
                f"and {self.num_heads}; each head has d_model / num_heads of the width"
            )
        by = BATCHED.multiple
        if self.head_dim % by or self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"{where}: d_model / num_heads, the head dim, must be a multiple of "
                f"{by} from {by} to {MAX_HEAD_DIM}, got {self.d_model} / "
                f"{self.num_heads} = {self.head_dim}; make the layer with another "
                "d_model or other num_heads"
            )
        kv_heads = self.num_kv_heads
        if kv_heads is not None:
            check_positive(where, num_kv_heads=kv_heads)
            if self.num_heads % kv_heads:
                raise ValueError(
                    f"{where}: num_kv_heads must divide num_heads, {self.num_heads}, "
                    f"got {kv_heads}; every key head serves as many query heads"
                )
        if not isinstance(self.pattern, AttentionPatterns):
            names = ", ".join(f"AttentionPatterns.{p.name}" for p in AttentionPatterns)
            raise TypeError(
                f"{where}: pattern must be one of {names}, got {self.pattern!r}"
            )
        check_choice(where, "strategy", self.strategy, STRATEGIES)
        if self.pattern is AttentionPatterns.RING:
            self._check_ring(where)
        if self.ulysses_degree is not None and self.is_parallel:
            check_degree_of(where, self.strategy)
        check_choice(where, "layout", self.layout, LAYOUTS)
        self._check_options(where)
        for name in ("window", "max_sequence_length"):
            if getattr(self, name) is not None:
                check_positive(where, **{name: getattr(self, name)})
        if self.pattern is AttentionPatterns.SLIDING_WINDOW and self.window is None:
            raise ValueError(
                f"{where}: pattern SLIDING_WINDOW needs a window, got None; say how "
                "many keys before its own a query sees"
            )
        for name in AXES:
            object.__setattr__(self, name, _checked_axes(where, name, self))
        self._check_distinct(where)

    def _check_ring(self, where: str) -> None:
        if self.strategy not in ("auto", "ring"):
            raise ValueError(
                f"{where}: strategy must be 'ring' or 'auto' with pattern RING, got "
                f"{self.strategy!r}; create_context_parallel_attention, or pattern "
                "CONTEXT_PARALLEL, serves it"
            )

    def _check_options(self, where: str) -> None:
        """Those of the attention; numbers become Python floats, which can be hashed."""
        check_flags(
            where,
            causal=self.causal,
            compiler_options=self.compiler_options,
            deterministic=self.deterministic,
        )
        check_choice(
            where, "implementation", self.implementation, (None, *IMPLEMENTATIONS)
        )
        if self.scale is not None:
            scale = check_scale(where, self.scale, self.head_dim)
            object.__setattr__(self, "scale", scale)
        if self.softcap is not None:
            object.__setattr__(self, "softcap", check_softcap(where, self.softcap))
        self._check_dropout(where)
        dtype = check_dtype(where, "dtype", self.dtype)
        if dtype not in DTYPES:
            raise TypeError(
                f"{where}: dtype must be bfloat16, float16 or float32, got {dtype}; "
                "what goes in may have another, and what comes out has that one"
            )

    def _check_dropout(self, where: str) -> None:
        fix = "make it a static argument of the jit (dropout_seed may be traced)"
        rate = finite(where, "dropout", self.dropout, 0.0, fix)
        threshold_of(where, rate, "dropout")
        object.__setattr__(self, "dropout", rate)

    def _check_distinct(self, where: str) -> None:
        """An axis cuts one dim."""
        seen: dict[Hashable, str] = {}
        for name in AXES:
            for axis in each_axis(getattr(self, name)):
                if axis in seen:
                    raise ValueError(
                        f"{where}: {name} must be another mesh axis than "
                        f"{seen[axis]}, got {axis!r} for both; an axis cuts one dim "
                        "once"
                    )
                seen[axis] = name

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def is_parallel(self) -> bool:
        """Whether the sequence is cut over a mesh axis."""
        p = AttentionPatterns
        return self.pattern in (p.RING, p.CONTEXT_PARALLEL)

    @property
    def is_causal(self) -> bool:
        p = AttentionPatterns
        return self.causal or self.pattern in (p.CAUSAL, p.SLIDING_WINDOW)


def each_axis(axis: Any) -> tuple[Hashable, ...]:
    """The mesh axes of a field, which may be one, several or None."""
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _checked_axes(where: str, name: str, config: AttentionConfig) -> Any:
    """A field that names mesh axes; a list becomes a tuple, which can be hashed."""
    axis = axes.hashable(getattr(config, name))
    if axis is None and name != "axis_name":
        return None
    names = each_axis(axis)
    wrong = (int, tuple, type(None))  # JAX takes an int for a dim
    if not names or any(
        isinstance(a, wrong) or not isinstance(a, Hashable) for a in names
    ):
        raise TypeError(
            f"{where}: {name} must be a mesh axis or a tuple of them, got {axis!r}; "
            "pass a name of the mesh, like 'context'"
        )
    return axis
