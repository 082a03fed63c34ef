"""`context_parallel_attention`: the contract."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_kvblock.attention.options import Output, Rows, SeedLike
from jax_kvblock.core import debug
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.core.types import ArrayIn, IdRows, Integers
from jax_kvblock.parallel import arguments, axes
from jax_kvblock.parallel.arguments import Normalized
from jax_kvblock.parallel.core import attend
from jax_kvblock.parallel.local import Mask
from jax_kvblock.parallel.sequence import SequenceLayout
from jax_kvblock.parallel.strategy import Strategy

if TYPE_CHECKING:
    from jaxtyping import Float

    AxisName: TypeAlias = Hashable | Sequence[Hashable]


class ContextOptions(TypedDict, total=False):
    """What `context_parallel_attention` takes by name, but for `return_lse`."""

    strategy: Strategy
    ulysses_degree: int | None
    layout: SequenceLayout
    causal: bool
    window: tuple[int | None, int | None] | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None
    cu_seqlens: Integers | tuple[Integers, Integers] | None
    max_seqlen: int | None
    softcap: float | None
    sinks: Float[ArrayIn, " N"] | None
    scale: float | None
    q_lens: Integers | None
    kv_lens: Integers | None
    dropout_rate: float
    dropout_seed: SeedLike
    deterministic: bool
    compiler_options: bool
    implementation: str | None


@overload
def context_parallel_attention(
    q: Float[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    axis_name: AxisName,
    return_lse: Literal[False] = ...,
    **options: Unpack[ContextOptions],
) -> Output: ...
@overload
def context_parallel_attention(
    q: Float[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    axis_name: AxisName,
    return_lse: Literal[True],
    **options: Unpack[ContextOptions],
) -> tuple[Output, Rows]: ...
@overload
def context_parallel_attention(
    q: Float[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    axis_name: AxisName,
    return_lse: bool,
    **options: Unpack[ContextOptions],
) -> Output | tuple[Output, Rows]: ...
def context_parallel_attention(
    q: Float[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    axis_name: AxisName,
    strategy: Strategy = "auto",
    ulysses_degree: int | None = None,
    layout: SequenceLayout = "zigzag",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: IdRows | tuple[IdRows, IdRows] | None = None,
    cu_seqlens: Integers | tuple[Integers, Integers] | None = None,
    max_seqlen: int | None = None,
    softcap: float | None = None,
    sinks: Float[ArrayIn, " N"] | None = None,
    scale: float | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: SeedLike = None,
    return_lse: bool = False,
    deterministic: bool = False,
    compiler_options: bool = False,
    implementation: str | None = None,
) -> Output | tuple[Output, Rows]:
    """Attention over a sequence that is cut over a mesh axis, inside `jax.shard_map`.

    Each device passes its rows of q, k and v and gets those of the result. It is
    `flash_attention` of the whole sequence; no device ever has it whole, but where it
    is gathered or heads are exchanged. One `jax.custom_vjp`: reverse mode, once. Name
    all mesh axes that cut anything in the shard_map: what an automatic axis beside it
    cuts is gathered, and an explicit one beside it is refused.

    Args:
      q: `[B, T, N, D]`, T of the sequence's `n T` rows; bfloat16, float16 or float32.
        Packed (with `cu_seqlens`): `[rows, N, D]`.
      k: `[B, S, K, D]`, N a multiple of K. Packed: `[rows, K, D]`.
      v: `[B, S, K, Dv]`.
      axis_name: the mesh axis, or axes, of n devices, that sequences are cut over.
      strategy: how keys and queries meet.
        "ring": keys and values go round, each shard under the work on the one before.
        "all_gather": every device gets all keys and values, under its work on its own.
        "ulysses": heads are exchanged for rows, so that each device has N / n heads of
        the whole sequence. Fewer KV heads than devices are repeated.
        "ulysses_ring": so in groups of `ulysses_degree` neighbours, and a ring of the
        groups.
        "auto": the one that takes the least time, by a model with rates of H200s, of
        which most are measured (docs/context_parallel.md says which, and how).
      ulysses_degree: with strategy "ulysses_ring", how many devices exchange heads: a
        divisor of n and of N, and a divisor or a multiple of K; those of a node, for
        one, where devices of other nodes are far. 1 is a ring, n is "ulysses". None is
        as many as K divides among, but fewer than all where that can be: of two devices
        that is 1, a ring.
      layout: "zigzag", as `to_zigzag` lays sequences out, so that all devices have as
        much to do under a causal mask; or "contiguous", device i has the rows from
        `i T` on. Positions, lengths and boundaries count in the sequence in either.
      causal, window, softcap, scale: as in `flash_attention`, by the positions in the
        whole sequence. A ring leaves out the shards that a window does not reach.
      segment_ids: int32 `[B, T]`, or a pair `[B, T]`, `[B, S]`, of this device's rows.
        -2**31 and -2**31 + 1 are no ids.
      cu_seqlens: int32 `[documents + 1]`, the same on every device: the first row of
        each packed document in the rows of all devices together, and the end of the
        last; a pair where queries and keys differ. In zigzag they are multiples of 2 n,
        and each document is cut over all devices (`to_zigzag(..., cu_seqlens=...)`).
        Traced boundaries that fall, or are no such multiples, give wrong results
        without an error, but under `debug_checks`.
      max_seqlen: the most rows that a packed document may have. Contiguous rows are
        then not sent farther than a document reaches: keys of longer ones would not be
        seen, which is an error where boundaries are on the host, or under
        `debug_checks`. On the host it is found in cu_seqlens.
      sinks: float32 `[N]`, as in `flash_attention`; on every device all of them.
      q_lens, kv_lens: int32 `[B]`, lengths of the whole sequences (of documents, with
        cu_seqlens). What lies beyond is never seen; outputs there are zeros.
      dropout_rate, dropout_seed: as in `flash_attention`, and the same pairs as there,
        by the positions in the whole sequence: pass the same seed on every device that
        the sequence is cut over. Runs of rows (T, in zigzag T / 2; the same of S) are
        multiples of 16 then. Not with cu_seqlens: say documents by segment_ids.
      return_lse: also return the log-sum-exp, float32 `[B, T, N]`; differentiable.
      deterministic: the gradients' bits are the same every time.
      compiler_options: True says that the jit around the call has `compiler_options()`.
        Without, a ring copies a device's own keys and values into one array that it
        sends, since XLA hides but one collective at a time, and kernels share out their
        work as multiprocessors become free, since NCCL takes some; and "all_gather"
        gathers by a collective, where with them, on GPUs whose copy engines send, each
        device sends to each other one directly.
      implementation: as in `flash_attention`.

    Returns:
      `[B, T, N, Dv]` in q's dtype, this device's rows; with `return_lse` the pair
      `(out, lse)`.

    What each device sends in the forward pass, in elements of a row's keys and values,
    `2 S K D`: ring and all_gather `n - 1` times those, all_gather with n times the
    memory; ulysses `(n - 1) / n` of its own q, k, v and out. Backward, a ring sends
    keys and values once more, and their gradients: as a kernel gives them at first, in
    float32 from the first sum on. all_gather gathers once more, and sends gradients
    home: summed in float32 on the way, or as the kernel gives them where copy engines
    send (`compiler_options`), and then summed there.

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit; the axis
        is not there; lengths or heads do not divide. The message says what would.

    Example:
      >>> mesh, rows = jax.make_mesh((4,), ("context",)), PartitionSpec(None, "context")
      >>> attend = jax.jit(jax.shard_map(
      ...     lambda q, k, v: context_parallel_attention(
      ...         q, k, v, axis_name="context", causal=True),
      ...     mesh=mesh, in_specs=rows, out_specs=rows))
      >>> cut = NamedSharding(mesh, rows)
      >>> laid = [jax.device_put(to_zigzag(x, 4), cut) for x in (q, k, v)]
      >>> out = from_zigzag(attend(*laid), 4)

    Source: Liu et al., Ring Attention (arXiv:2310.01889); Jacobs et al.,
    DeepSpeed-Ulysses (arXiv:2309.14509); Fang and Zhao, USP (arXiv:2405.07719); the
    zigzag of Dubey et al., Llama 3 (arXiv:2407.21783).
    """
    where = "context_parallel_attention"
    return attend_as(
        where,
        q,
        k,
        v,
        axis_name=axis_name,
        strategy=strategy,
        ulysses_degree=ulysses_degree,
        layout=layout,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        deterministic=deterministic,
        compiler_options=compiler_options,
        implementation=implementation,
    )


def attend_as(where: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`context_parallel_attention`, called `where` in messages.

    In place of a dropout_seed there may be `dropout_keys`, those of the members and
    heads that are here.
    """
    out, lse = _run(arguments.normalize(where, q, k, v, **options))
    return (out, lse) if options.get("return_lse") else out


def _run(call: Normalized) -> tuple[jax.Array, jax.Array]:
    """out and lse `[B, T, N]`."""
    plan, mask, exchange = call.plan, call.mask, call.exchange
    # All vary alike, over the mesh axis too: so do their gradients.
    place = axes.index(plan.axis_name)
    q, k, v, sinks, *ints, _ = vary_alike(
        [call.q, call.k, call.v, call.sinks, *mask, place]
    )
    mask = Mask(*ints)
    if plan.packed:  # no device waits for one that has failed
        q, k, v = debug.after((mask.cu_q, mask.cu_kv), [q, k, v])
    if exchange is None:
        out, lse = attend(plan, q, k, v, sinks, mask)
        return out, jnp.swapaxes(lse, -1, -2)
    q = exchange.heads(q, mask.cu_q)
    k, v = (exchange.heads(a, mask.cu_kv) for a in (k, v))
    mask = mask._replace(
        q_segments=exchange.ids(mask.q_segments, mask.cu_q),
        kv_segments=exchange.ids(mask.kv_segments, mask.cu_kv),
        dropout_keys=exchange.own(mask.dropout_keys),
    )
    out, lse = attend(plan, q, k, v, exchange.own(sinks), mask)
    rows = jnp.swapaxes(lse, -1, -2)[..., None]
    return exchange.rows(out, mask.cu_q), exchange.rows(rows, mask.cu_q)[..., 0]
