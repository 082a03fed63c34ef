"""A self-attention layer that visits a part of the tiles."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.arguments import check_flags, finite
from jax_kvblock.attention.cuda import MAX_HEAD_DIM
from jax_kvblock.attention.dropout import threshold_of
from jax_kvblock.attention.options import SeedLike
from jax_kvblock.core.checks import as_array, check_dtype, check_positive, show
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.sparse.antidiagonal import AntidiagonalThreshold
from jax_kvblock.sparse.arguments import key_of
from jax_kvblock.sparse.attention import sparse_attention
from jax_kvblock.sparse.budget import check_ratio
from jax_kvblock.sparse.gate import Gate, LearnedGate, init_gate
from jax_kvblock.sparse.patterns import BlockSparse, LocalGlobal, Random, Strided
from jax_kvblock.sparse.select import Report, warn_if_short
from jax_kvblock.sparse.selector import Selector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SPARSITY_RATIO = 0.9  # unless given
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class SparsePattern(enum.Enum):
    """Which tiles a layer visits."""

    RANDOM = "random"
    BLOCK_SPARSE = "block_sparse"
    STRIDED = "strided"
    LOCAL_GLOBAL = "local_global"
    DYNAMIC_THRESHOLD = "dynamic_threshold"
    LEARNED = "learned"


_PATTERNS: dict[SparsePattern, type[Selector]] = {
    SparsePattern.RANDOM: Random,
    SparsePattern.BLOCK_SPARSE: BlockSparse,
    SparsePattern.STRIDED: Strided,
    SparsePattern.LOCAL_GLOBAL: LocalGlobal,
    SparsePattern.DYNAMIC_THRESHOLD: AntidiagonalThreshold,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # `jax.jit(layer)` hashes it
class DynamicSparseAttention:
    """Self-attention over the tiles that a selector lists.

    A pytree of its weights and its selector; `create_sparse_attention` makes one.

    Attributes:
      qkv: `[d_model, (N + 2 K) D]`: queries, keys and values side by side.
      out: `[N D, d_model]`.
      selector: who chooses.
      num_heads, num_kv_heads: N and K.
      causal: whether a position sees those up to its own alone.
      dropout: the share of the probabilities that become 0 in calls that are given a
        `dropout_seed`, as `dropout_rate` in `flash_attention`.
    """

    qkv: jax.Array
    out: jax.Array
    selector: Selector
    num_heads: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    def __call__(
        self,
        hidden_states: Float[ArrayIn, "B S d_model"],
        segment_ids: Int[ArrayIn, "B S"] | None = None,
        dropout_seed: SeedLike = None,
    ) -> Float[jax.Array, "B S d_model"]:
        """Attends.

        Args:
          hidden_states: `[B, S, d_model]`, floats.
          segment_ids: int32 `[B, S]`; a position sees its own segment alone.
          dropout_seed: which probabilities the layer's dropout makes 0, as in
            `flash_attention`, another one for each layer and step: a key of
            `jax.random`, say. None drops nothing, as where a model is evaluated.
            Selectors know nothing of it.

        Returns:
          `[B, S, d_model]` in the dtype of hidden_states.

        Raises:
          TypeError, ValueError: shapes or dtypes do not fit.

        Warns:
          UserWarning: where rows are short of tau; under jit, once it is traced, where
            tau has a bound, so that rows may be.
        """
        made, report = self.with_report(hidden_states, segment_ids, dropout_seed)
        bounded = self.selector.may_be_short(made.shape[1])
        warn_if_short(type(self).__name__, report, "call with_report", bounded)
        return made

    def with_report(
        self,
        hidden_states: Float[ArrayIn, "B S d_model"],
        segment_ids: Int[ArrayIn, "B S"] | None = None,
        dropout_seed: SeedLike = None,
    ) -> tuple[Float[jax.Array, "B S d_model"], Report]:
        """What the layer gives, and what its selector says of the tiles."""
        x = as_array(type(self).__name__, "hidden_states", hidden_states)
        q, k, v = self._projected(x)
        o, report = sparse_attention(
            q,
            k,
            v,
            self.selector,
            causal=self.causal,
            segment_ids=segment_ids,
            dropout_rate=0.0 if dropout_seed is None else self.dropout,
            dropout_seed=dropout_seed,
            return_report=True,
        )
        assert report is not None  # of a selector there is one
        o = o.reshape(*x.shape[:2], self.out.shape[0])
        return jnp.matmul(o, self.out).astype(x.dtype), report

    def queries_and_keys(
        self, hidden_states: Float[ArrayIn, "B S d_model"]
    ) -> tuple[Float[jax.Array, "B S N D"], Float[jax.Array, "B S K D"]]:
        """What the selector is given: for `train_gate` and `evaluate_selector`."""
        x = as_array(type(self).__name__, "hidden_states", hidden_states)
        return self._projected(x)[:2]

    def with_gate(self, gate: Gate) -> DynamicSparseAttention:
        """A layer of pattern LEARNED with another gate, that `train_gate` gave."""
        if not isinstance(self.selector, LearnedGate):
            raise TypeError(
                f"{type(self).__name__}: with_gate is for pattern LEARNED, got "
                f"{type(self.selector).__name__}; make the layer with "
                "pattern=SparsePattern.LEARNED"
            )
        selector = dataclasses.replace(self.selector, gate=gate)
        return dataclasses.replace(self, selector=selector)

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        width = self.qkv.shape[0]
        if x.ndim != 3 or x.shape[-1] != width:
            raise ValueError(
                f"{type(self).__name__}: hidden_states must be [B, S, {width}], got "
                f"{show(x)}; add a batch axis with x[None], or make the layer with "
                "another d_model"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{type(self).__name__}: hidden_states must be floats, got {show(x)}; "
                "cast them with .astype(jnp.float32)"
            )
        if 0 in x.shape[1:]:
            raise ValueError(
                f"{type(self).__name__}: hidden_states must not be empty, got "
                f"{show(x)}; leave the call out"
            )
        n, k = self.num_heads, self.num_kv_heads
        wide = jnp.matmul(x.astype(self.qkv.dtype), self.qkv)
        wide = wide.reshape(*x.shape[:2], n + 2 * k, wide.shape[-1] // (n + 2 * k))
        q, keys, values = jnp.split(wide, (n, n + k), axis=2)
        return q, keys, values


def create_sparse_attention(
    d_model: int,
    num_heads: int,
    sparsity_ratio: float = SPARSITY_RATIO,
    pattern: SparsePattern = SparsePattern.DYNAMIC_THRESHOLD,
    *,
    num_kv_heads: int | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    selector: Selector | None = None,
    key: jax.Array | None = None,
    dtype: Any = jnp.float32,
    **options: Any,
) -> DynamicSparseAttention:
    """A layer with fresh weights that visits `1 - sparsity_ratio` of the tiles.

    Args:
      d_model, num_heads: the width, and the heads, which divide it into head dims that
        are multiples of 8 up to 256.
      sparsity_ratio: the share of the mask's tiles that is left out, from 0 to 0.95.
        DYNAMIC_THRESHOLD and LEARNED also leave out what tau does not need, if tau is
        among the options; a row that would need more than its share has what fits, and
        the report says so.
      pattern: which tiles. LEARNED begins with a gate that has learned nothing yet:
        train it with `train_gate`, and pass it to the layer's `with_gate`.
      num_kv_heads: key heads, which divide num_heads; as many unless given.
      causal: a position sees those up to its own alone.
      dropout: the share of the probabilities that become 0 where a call is given a
        `dropout_seed`, from 0 on and below 1.
      selector: in place of sparsity_ratio, pattern and options, one that is made
        already.
      key: for the weights, `jax.random.key(0)` unless given.
      dtype: of the weights and of attention: bfloat16, float16 or float32.
      **options: the other fields of the pattern's selector: `block_q`, `block_kv`,
        `seed`, `stride`, `tau`, and so on.

    Raises:
      TypeError, ValueError: sizes that do not fit, a ratio outside of 0 to 0.95, a
        dropout outside of 0 to 1, a pattern or an option that there is not, or one
        beside a selector; a key that is none.

    Example:
      >>> attention = create_sparse_attention(d_model=512, num_heads=8)
      >>> attention(jnp.ones((1, 2048, 512))).shape
      (1, 2048, 512)
    """
    where = "create_sparse_attention"
    check_flags(where, causal=causal)
    d_model, num_heads = check_positive(where, d_model=d_model, num_heads=num_heads)
    kv = num_heads if num_kv_heads is None else num_kv_heads
    (kv,) = check_positive(where, num_kv_heads=kv)
    for name, whole, part in (
        ("num_heads must divide d_model", d_model, num_heads),
        ("num_kv_heads must divide num_heads", num_heads, kv),
    ):
        if whole % part:
            raise ValueError(
                f"{where}: {name}, {whole}, got {part}; each head has the same share"
            )
    dtype = check_dtype(where, "dtype", dtype)
    if dtype not in DTYPES:
        raise TypeError(
            f"{where}: dtype must be bfloat16, float16 or float32, got {dtype}; what "
            "goes in may have another, and what comes out has that one"
        )
    fix = "make it a static argument of the jit (dropout_seed may be traced)"
    rate = finite(where, "dropout", dropout, 0.0, fix)
    threshold_of(where, rate, "dropout")
    head_dim = d_model // num_heads
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{where}: d_model must be num_heads times a multiple of 8 up to "
            f"{MAX_HEAD_DIM}, got {d_model} for {num_heads} heads, of {head_dim} each; "
            "attention serves these head dims"
        )
    keys = jax.random.split(key_of(where, key), 3)
    if selector is None:
        ratio = check_ratio(where, sparsity_ratio)
        heads = (num_heads, kv, head_dim)
        selector = _selector(where, ratio, pattern, heads, keys[2], options)
    elif not isinstance(selector, Selector):
        raise TypeError(
            f"{where}: selector must be a Selector, got {type(selector).__name__}; "
            "Streaming(), say"
        )
    else:
        beside = ["sparsity_ratio"] * (sparsity_ratio != SPARSITY_RATIO)
        beside += ["pattern"] * (pattern is not SparsePattern.DYNAMIC_THRESHOLD)
        beside += options
        if beside:
            raise TypeError(
                f"{where}: selector must be given without other options, got "
                f"{', '.join(beside)}; a selector has its options as fields"
            )
    init = jax.nn.initializers.lecun_normal()
    return DynamicSparseAttention(
        init(keys[0], (d_model, (num_heads + 2 * kv) * head_dim), dtype),
        init(keys[1], (d_model, d_model), dtype),
        selector,
        num_heads,
        kv,
        bool(causal),
        rate,
    )


def _selector(
    where: str,
    ratio: float,
    pattern: Any,
    heads: tuple[int, int, int],
    key: jax.Array,
    options: dict[str, Any],
) -> Selector:
    if not isinstance(pattern, SparsePattern):
        names = ", ".join(f"SparsePattern.{p.name}" for p in SparsePattern)
        raise TypeError(f"{where}: pattern must be one of {names}, got {pattern!r}")
    made: dict[str, Any] = {"sparsity_ratio": ratio, **options}
    if pattern is SparsePattern.LEARNED:
        kind: Any = LearnedGate
        made.setdefault("gate", init_gate(*heads, key=key))
    else:
        kind = _PATTERNS[pattern]
    if pattern is SparsePattern.DYNAMIC_THRESHOLD:
        made.setdefault("tau", None)  # the ratio decides alone
    fields = {field.name for field in dataclasses.fields(kind)}
    wrong = sorted(set(made) - fields)
    if wrong:
        raise TypeError(
            f"{where}: options must be fields of {kind.__name__}, "
            f"{', '.join(sorted(fields))}, got {', '.join(wrong)}"
        )
    selector: Selector = kind(**made)
    return selector
