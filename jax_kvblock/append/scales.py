"""`KVScales`, the scales of a cache that has one for each token and head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_kvblock.blocks.layout import BlockSpec, check_spec
from jax_kvblock.core import checks
from jax_kvblock.core.types import ArrayIn, LayerIndex

if TYPE_CHECKING:
    from jaxtyping import Float


@jax.tree_util.register_pytree_with_keys_class
class KVScales:
    """A scale for each token and KV head of a pool of 8 bits: number = stored · scale.

    A pytree, as a pool is: take it into a jit beside the pool, donate both, and
    `append_kv` and `rope_append` update both in place. `KVScales.zeros` makes one.

    Attributes:
      k: float32 `[num_layers, num_blocks, block_size, nh]`, or without the layers those
        of one layer. The axes have this order in every layout of the pool.
      v: the same of the values, None for a pool with num_outer 1.

    Raises:
      TypeError, ValueError: when an array has another rank or dtype, or both differ.

    Example:
      >>> spec = BlockSpec(32, 2, 16, 8, 128, jnp.float8_e4m3fn)
      >>> pool, scales = KVPool.zeros(spec, 1024), KVScales.zeros(spec, 1024)
      >>> pool, scales = append_kv(pool, layer, k, v, slots, scales=scales)
    """

    k: Any
    v: Any

    def __init__(
        self,
        k: Float[ArrayIn, "*num_layers num_blocks block_size nh"],
        v: Float[ArrayIn, "*num_layers num_blocks block_size nh"] | None = None,
    ) -> None:
        self.k = _checked("k", k)
        self.v = None if v is None else _checked("v", v)
        if v is not None and self.k.shape != self.v.shape:
            raise ValueError(
                f"KVScales: k and v must have one shape, got {checks.show(self.k)} and "
                f"{checks.show(self.v)}"
            )

    @classmethod
    def zeros(
        cls, spec: BlockSpec, num_blocks: int, *, all_layers: bool = True
    ) -> KVScales:
        """Scales of 0, for a pool of `num_blocks` blocks of `spec` that is all zeros.

        Args:
          spec: what a block is.
          num_blocks: blocks in the pool, at least 1.
          all_layers: for all layers; False for one alone, without their axis.

        Raises:
          TypeError, ValueError: for something else than a spec, or a bad count.
        """
        check_spec("KVScales.zeros", spec)
        (num_blocks,) = checks.check_positive("KVScales.zeros", num_blocks=num_blocks)
        layers = (spec.num_layers,) if all_layers else ()
        shape = (*layers, num_blocks, spec.block_size, spec.num_kv_heads)
        v = jnp.zeros(shape, jnp.float32) if spec.num_outer == 2 else None
        return cls(jnp.zeros(shape, jnp.float32), v)

    def layer(self, layer: LayerIndex) -> KVScales:
        """The scales of one layer, static or traced: a slice, as attention takes it."""
        return jax.tree.map(lambda a: a[layer], self)

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return [(key("k"), self.k), (key("v"), self.v)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> KVScales:
        # Unchecked: trees hold all sorts of leaves while JAX works on them.
        made = object.__new__(cls)
        made.k, made.v = children
        return made

    def __repr__(self) -> str:
        v = "None" if self.v is None else checks.show(self.v)
        return f"KVScales(k={checks.show(self.k)}, v={v})"


def _checked(name: str, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        array: Any = x
    else:
        array = checks.check_array("KVScales", name, x, in_place=True)
    if array.dtype != np.float32:
        raise TypeError(
            f"KVScales: {name} must be float32, got {checks.show(array)}; cast it with "
            ".astype(jnp.float32)"
        )
    if array.ndim < 3:
        raise ValueError(
            f"KVScales: {name} must be [num_layers, num_blocks, block_size, nh], or "
            f"one layer's without the first, got {checks.show(array)}"
        )
    return (
        array
        if array is x and isinstance(x, jax.ShapeDtypeStruct)
        else (checks.to_jax(array))
    )


def check_scales(where: str, scales: Any, shape: tuple[int, ...], outer: int) -> None:
    """KVScales for a pool of this shape, `(num_layers, num_blocks, block_size, nh)`."""
    if not isinstance(scales, KVScales):
        raise TypeError(
            f"{where}: scales must be KVScales, got {type(scales).__name__}; make them "
            "with KVScales.zeros(spec, num_blocks)"
        )
    if (scales.v is None) != (outer == 1):
        raise ValueError(
            f"{where}: scales must have k and v as the pool has, whose num_outer is "
            f"{outer}, got v={checks.show(scales.v)}"
        )
    for name, a in (("k", scales.k), ("v", scales.v)):
        if a is not None and tuple(a.shape) not in (shape, shape[1:]):
            raise ValueError(
                f"{where}: scales.{name} must be float32{list(shape)}, or "
                f"float32{list(shape[1:])} of one layer, got {checks.show(a)}"
            )


jax.export.register_pytree_node_serialization(
    KVScales,
    serialized_name="jax_kvblock.KVScales",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)
