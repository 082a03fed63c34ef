"""What `bench_fusion.py` times: each choice of a transformer's block in several ways.

A way is a function of `(x, weights)`, with what makes its weights of those that the
plain way has. Ways of one choice are entries of a dict: another kernel is another
entry. The first one is the plain one, which the others are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import (
    BlockSpec,
    KVPool,
    append_kv,
    flash_attention,
    paged_attention,
    rope_append,
)
from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.layers.gelu import gelu
from support.common import OURS

BLOCK, THETA, EPSILON = 16, 5e5, 1e-6
LIBRARY = {"xla_gpu_enable_triton_gemm": False}  # cuBLASLt alone, with its epilogues


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a block's inputs. `layers` of them, with weights of their own, are a program,
    so that a small one's weights do not stay in the cache."""

    name: str
    batch: int
    length: int
    layers: int
    backward: bool
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 16384
    context: int = 0  # keys of a cache, of a step of decoding
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        narrow = self.kv_heads * self.dim
        return self.heads * self.dim, narrow, narrow


LARGE = Sizes("B4 S4096", 4, 4096, 1, True)
SMALL = Sizes("B64 S1", 64, 1, 8, False, context=1024)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of a choice.

    Attributes:
      function: of x and the weights (a list of dicts, one a layer); with `state`, of
        the state, x and weights, and what it returns begins with the new state.
      prepare: makes a layer's weights of the plain way's.
      options: of the compiler.
      state: makes what is donated to each call and comes back from it.
      jit: False runs op by op.
      backward: whether it is differentiated, where the sizes are.
    """

    function: Callable[..., Any]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    options: dict[str, Any] | None = None
    state: Callable[[], Any] | None = None
    jit: bool = True
    backward: bool = True


@dataclasses.dataclass(frozen=True)
class Choice:
    """Ways of the same work, on the same inputs."""

    ways: dict[str, Way]
    x: Any
    weights: list[dict[str, Any]]
    backward: bool
    launches: bool = False  # of each way, by the profiler
    alike: float = 0.02  # what results may be apart, in parts of their norm


def drawn(number: int, *shape: int, dtype: str) -> jax.Array:
    """Normal numbers; matrices are scaled so that what they make is as large."""
    scale = shape[0] ** -0.5 if len(shape) == 2 else 1.0
    made = jax.random.normal(jax.random.key(number), shape, jnp.float32) * scale
    return made.astype(dtype)


def chained(layer: Callable[..., Any], mixed: Callable[..., Any]) -> Callable[..., Any]:
    """`layer` of each layer's weights; `mixed(x, what it made)` is the next one's x."""

    def run(x: Any, weights: list[Any]) -> Any:
        for own in weights[:-1]:
            x = mixed(x, layer(x, own))
        return layer(x, weights[-1])

    return run


# ---- pieces of a block ---------------------------------------------------------------


def rms(x: Any) -> Any:
    """One over each row's root mean square, float32."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON)


def norm(x: Any, weight: Any) -> Any:
    return (x.astype(jnp.float32) * rms(x)).astype(x.dtype) * weight


def turned(x: Any, positions: Any) -> Any:
    """RoPE of `[..., S, N, D]`, halves being pairs."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(THETA ** -(np.arange(half) / half), jnp.float32)
    angle = positions[..., None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def three_products(x: Any, w: dict[str, Any]) -> Any:
    return tuple(x @ w[name] for name in "qkv")


def joined_product(sizes: Sizes) -> Callable[..., Any]:
    cuts = np.cumsum(sizes.parts)[:-1].tolist()
    return lambda x, w: tuple(jnp.split(x @ w["qkv"], cuts, -1))


def join(w: dict[str, Any]) -> dict[str, Any]:
    rest = {name: a for name, a in w.items() if name not in ("q", "k", "v")}
    return rest | {"qkv": jnp.concatenate([w["q"], w["k"], w["v"]], -1)}


def qkv_weights(sizes: Sizes, layer: int) -> dict[str, Any]:
    return {
        name: drawn(10 * layer + i, sizes.width, columns, dtype=sizes.dtype)
        for i, (name, columns) in enumerate(zip("qkv", sizes.parts, strict=True))
    }


# ---- the choices ---------------------------------------------------------------------


def projections(sizes: Sizes) -> Choice:
    joined = joined_product(sizes)

    def mixed(x: Any, made: Any) -> Any:
        q, k, v = made
        rest = jnp.concatenate([k, v], -1)
        fit = -(-x.shape[-1] // rest.shape[-1])
        rest = jnp.tile(rest, (*[1] * (rest.ndim - 1), fit))[..., : x.shape[-1]]
        return (q[..., : x.shape[-1]] + rest) * 0.7

    ways = {
        "xla, three products": Way(chained(three_products, mixed)),
        f"{OURS}, kept joined": Way(chained(joined, mixed), prepare=join),
        f"{OURS}, joined in each call": Way(
            chained(lambda x, w: joined(x, join(w)), mixed)
        ),
    }
    x = drawn(1, sizes.tokens, sizes.width, dtype=sizes.dtype)
    weights = [qkv_weights(sizes, i) for i in range(sizes.layers)]
    return Choice(ways, x, weights, sizes.backward)


def residual_norm(sizes: Sizes) -> Choice:
    """The sum goes on to the next layer, and its norm to a product."""

    def mixed(x: Any, made: Any) -> Any:
        return made[0], made[1]

    def one_loop(x: Any, w: Any) -> Any:
        total = x[0] + x[1]
        return total, norm(total, w["g"])

    def apart(x: Any, w: Any) -> Any:
        total = jax.lax.optimization_barrier(x[0] + x[1])
        return total, norm(total, w["g"])

    ways = {
        "xla": Way(chained(one_loop, mixed)),
        "xla, sum and norm apart": Way(chained(apart, mixed), backward=False),
    }
    x = tuple(
        drawn(i, sizes.batch, sizes.length, sizes.width, dtype=sizes.dtype)
        for i in (1, 2)
    )
    weights = [
        {"g": 1 + 0.1 * drawn(9 + i, sizes.width, dtype=sizes.dtype)}
        for i in range(sizes.layers)
    ]
    return Choice(ways, x, weights, sizes.backward)


def norm_product(sizes: Sizes) -> Choice:
    """Residual, norm and the product behind it, which the norm may follow."""

    def before(x: Any, w: Any) -> Any:
        total = x[0] + x[1]
        return total, norm(total, w["g"]) @ w["w"]

    def behind(x: Any, w: Any) -> Any:
        total = x[0] + x[1]
        made = jnp.matmul(total, w["w"], preferred_element_type=jnp.float32)
        return total, (made * rms(total)).astype(total.dtype)

    def folded(w: dict[str, Any]) -> dict[str, Any]:
        return {"w": (w["g"][:, None] * w["w"]).astype(w["w"].dtype)}

    def mixed(x: Any, made: Any) -> Any:
        return made[0], made[1][..., : x[0].shape[-1]]

    ways = {
        "xla, norm first": Way(chained(before, mixed)),
        "xla, norm behind the product": Way(chained(behind, mixed), prepare=folded),
    }
    plain = residual_norm(sizes)
    columns = sum(sizes.parts)
    weights = [
        w | {"w": drawn(20 + i, sizes.width, columns, dtype=sizes.dtype)}
        for i, w in enumerate(plain.weights)
    ]
    return Choice(ways, plain.x, weights, sizes.backward)


def bias_gelu(sizes: Sizes) -> Choice:
    def plain(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w["w"] + w["b"], approximate=True)

    def apart(x: Any, w: Any) -> Any:
        made = jax.lax.optimization_barrier(x @ w["w"])
        return jax.nn.gelu(made + w["b"], approximate=True)

    def input_kept(x: Any, w: Any) -> Any:
        return kept_gelu(x @ w["w"] + w["b"])

    def in_float32(x: Any, w: Any) -> Any:
        return gelu(x @ w["w"] + w["b"], True)

    def mixed(x: Any, made: Any) -> Any:
        return made[..., : x.shape[-1]]

    ways = {
        "xla": Way(chained(plain, mixed)),
        "xla, cublaslt alone": Way(chained(plain, mixed), options=LIBRARY),
        "xla, product apart": Way(chained(apart, mixed), backward=False),
        f"{OURS}, input kept": Way(chained(input_kept, mixed)),
        f"{OURS}, input kept, cublaslt alone": Way(
            chained(input_kept, mixed), options=LIBRARY
        ),
        f"{OURS}, FusedGELU": Way(chained(in_float32, mixed)),
    }
    x = drawn(1, sizes.tokens, sizes.width, dtype=sizes.dtype)
    weights = [
        {
            "w": drawn(30 + i, sizes.width, sizes.hidden, dtype=sizes.dtype),
            "b": 0.1 * drawn(40 + i, sizes.hidden, dtype=sizes.dtype),
        }
        for i in range(sizes.layers)
    ]
    return Choice(ways, x, weights, sizes.backward)


def spec_of(sizes: Sizes) -> BlockSpec:
    return BlockSpec(
        sizes.layers, 2, BLOCK, sizes.kv_heads, sizes.dim, sizes.dtype, "NHD"
    )


def empty_pool(sizes: Sizes, tokens: int) -> KVPool:
    return KVPool.zeros(spec_of(sizes), -(-tokens // BLOCK))


def rope_and_append(sizes: Sizes) -> Choice:
    """q, k and v of each layer are its weights; x is where they go."""
    at = jnp.arange(sizes.tokens, dtype=jnp.int32)

    def ours(pool: Any, x: Any, weights: Any) -> Any:
        made = []
        for layer, w in enumerate(weights):
            q, pool = rope_append(
                w["q"], w["k"], w["v"], pool, layer, x, x, theta=THETA
            )
            made.append(q)
        return pool, made

    def two_steps(pool: Any, x: Any, weights: Any) -> Any:
        made = []
        for layer, w in enumerate(weights):
            made.append(turned(w["q"], x))
            pool = append_kv(pool, layer, turned(w["k"], x), w["v"], x)
        return pool, made

    def scattered(pool: Any, x: Any, weights: Any) -> Any:
        data, made = pool.data, []
        for layer, w in enumerate(weights):
            made.append(turned(w["q"], x))
            kv = jnp.stack([turned(w["k"], x), w["v"]], 1)
            where = x // BLOCK, layer, slice(None), x % BLOCK
            data = data.at[where].set(kv, unique_indices=True)
        return KVPool(data, pool.spec), made

    def new_pool() -> Any:
        return empty_pool(sizes, sizes.tokens)

    ways = {
        "xla, rotation and scatter": Way(scattered, state=new_pool),
        f"{OURS}, append_kv after xla": Way(two_steps, state=new_pool),
        f"{OURS}, rope_append": Way(ours, state=new_pool),
    }
    rows = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
    weights = [
        {
            name: drawn(
                50 + 3 * layer + i, sizes.tokens, n, sizes.dim, dtype=sizes.dtype
            )
            for i, (name, n) in enumerate(rows.items())
        }
        for layer in range(sizes.layers)
    ]
    return Choice(ways, at, weights, False)


def attend_by(implementation: str) -> Callable[..., Any]:
    """Causal attention by `jax.nn`, or ours."""
    if implementation == OURS:
        return lambda q, k, v: flash_attention(q, k, v, causal=True)
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation=implementation
    )


def attention(sizes: Sizes, names: tuple[str, ...]) -> Choice:
    def way(implementation: str) -> Way:
        attend = attend_by(implementation)
        return Way(lambda x, weights: attend(*x))

    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    x = tuple(
        drawn(i, sizes.batch, sizes.length, n, sizes.dim, dtype=sizes.dtype)
        for i, n in enumerate(heads)
    )
    return Choice({n: way(n) for n in names}, x, [], sizes.backward)


# ---- the whole block -----------------------------------------------------------------


def block_weights(sizes: Sizes, layer: int) -> dict[str, Any]:
    def own(number: int, *shape: int) -> Any:
        return drawn(100 + 10 * layer + number, *shape, dtype=sizes.dtype)

    return qkv_weights(sizes, layer) | {
        "g1": 1 + 0.1 * own(0, sizes.width),
        "g2": 1 + 0.1 * own(1, sizes.width),
        "out": own(2, sizes.heads * sizes.dim, sizes.width),
        "up": own(3, sizes.width, sizes.hidden),
        "b_up": 0.1 * own(4, sizes.hidden),
        "down": own(5, sizes.hidden, sizes.width),
        "b_down": 0.1 * own(6, sizes.width),
    }


def feed_forward(x: Any, w: dict[str, Any], act: Callable[..., Any]) -> Any:
    made = act(norm(x, w["g2"]) @ w["up"] + w["b_up"])
    return x + made @ w["down"] + w["b_down"]


def plain_gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=True)


def block(sizes: Sizes, names: tuple[str, ...]) -> Choice:
    """Forward (and backward) of whole sequences, without a cache."""
    positions = jnp.arange(sizes.length, dtype=jnp.int32)

    def layer(project: Any, attend: Any, act: Any) -> Callable[..., Any]:
        def run(x: Any, w: dict[str, Any]) -> Any:
            q, k, v = (
                a.reshape(*a.shape[:-1], -1, sizes.dim)
                for a in project(norm(x, w["g1"]), w)
            )
            seen = attend(turned(q, positions), turned(k, positions), v)
            x = x + seen.reshape(*x.shape[:-1], -1) @ w["out"]
            return feed_forward(x, w, act)

        return chained(run, lambda x, made: made)

    joined = joined_product(sizes)
    ours = attend_by(OURS)
    ways = {
        who if who == "xla" else f"xla, {who}": Way(
            layer(three_products, attend_by(who), plain_gelu)
        )
        for who in names
        if who != OURS
    }
    ways |= {
        f"{OURS}, attention alone": Way(layer(three_products, ours, plain_gelu)),
        f"{OURS}, and q, k, v joined": Way(layer(joined, ours, plain_gelu), join),
        f"{OURS}, and GELU's input kept": Way(layer(joined, ours, kept_gelu), join),
    }
    by = "cudnn" if "cudnn" in names else "xla"
    plain = layer(three_products, attend_by(by), plain_gelu)
    ways[f"xla, {by}, cublaslt alone"] = Way(plain, options=LIBRARY)
    ways[f"{OURS}, and cublaslt alone"] = Way(
        layer(joined, ours, kept_gelu), join, options=LIBRARY
    )
    ways["op by op"] = Way(plain, jit=False)
    x = drawn(1, sizes.batch, sizes.length, sizes.width, dtype=sizes.dtype)
    weights = [block_weights(sizes, i) for i in range(sizes.layers)]
    return Choice(ways, x, weights, sizes.backward, launches=True, alike=0.03)


def decode_block(sizes: Sizes, names: tuple[str, ...]) -> Choice:
    """A step of decoding: each sequence's last key is the one that is written."""
    count, last = sizes.context, sizes.context - 1
    tables = jnp.arange(sizes.batch * count // BLOCK, dtype=jnp.int32)
    tables = tables.reshape(sizes.batch, -1)
    lens = jnp.full(sizes.batch, count, jnp.int32)
    starts = jnp.arange(sizes.batch + 1, dtype=jnp.int32)
    at = jnp.full(sizes.batch, last, jnp.int32)
    slots = jnp.arange(sizes.batch, dtype=jnp.int32) * count + last
    kept = drawn(2, 1, BLOCK, sizes.kv_heads, sizes.dim, dtype=sizes.dtype)

    def caches() -> Any:
        """Of each layer, keys and values `[B, S, K, D]`: one block, again and again."""
        shape = (sizes.batch, count, sizes.kv_heads, sizes.dim)
        made = jax.jit(lambda a: jnp.tile(a, (sizes.batch, count // BLOCK, 1, 1)))
        assert made(kept).shape == shape
        return [(made(kept), made(kept)) for _ in range(sizes.layers)]

    def pool() -> Any:
        blocks = sizes.batch * count // BLOCK
        data = jnp.broadcast_to(kept[0], (blocks, sizes.layers, 2, *kept.shape[1:]))
        return KVPool(jnp.array(data), spec_of(sizes))

    def heads(project: Any, x: Any, w: Any) -> Any:
        made = project(norm(x, w["g1"]), w)
        return (a.reshape(sizes.batch, -1, sizes.dim) for a in made)

    def finish(x: Any, seen: Any, w: Any) -> Any:
        return feed_forward(x + seen.reshape(sizes.batch, -1) @ w["out"], w, plain_gelu)

    def ours(project: Any) -> Callable[..., Any]:
        def run(pool: Any, x: Any, weights: Any) -> Any:
            for layer, w in enumerate(weights):
                q, k, v = heads(project, x, w)
                q, pool = rope_append(q, k, v, pool, layer, slots, at, theta=THETA)
                seen = paged_attention(q, pool, layer, tables, lens, query_start=starts)
                x = finish(x, seen, w)
            return pool, x

        return run

    def by_jax(implementation: str) -> Callable[..., Any]:
        rows = jnp.arange(sizes.batch)

        def run(caches: Any, x: Any, weights: Any) -> Any:
            new = []
            for (keys, values), w in zip(caches, weights, strict=True):
                q, k, v = heads(three_products, x, w)
                q, k = turned(q, at), turned(k, at)
                keys = keys.at[rows, last].set(k)
                values = values.at[rows, last].set(v)
                new.append((keys, values))
                # All of its keys are there, so that it needs no lengths.
                seen = jax.nn.dot_product_attention(
                    q[:, None], keys, values, implementation=implementation
                )
                x = finish(x, seen, w)
            return new, x

        return run

    ways = {
        who if who == "xla" else f"xla, {who}": Way(by_jax(who), state=caches)
        for who in names
        if who != OURS
    }
    joined = joined_product(sizes)
    ways |= {
        f"{OURS}, cache and attention": Way(ours(three_products), state=pool),
        f"{OURS}, and q, k, v joined": Way(ours(joined), join, state=pool),
        "op by op": Way(by_jax("xla"), state=caches, jit=False),
    }
    x = drawn(1, sizes.batch, sizes.width, dtype=sizes.dtype)
    weights = [block_weights(sizes, i) for i in range(sizes.layers)]
    return Choice(ways, x, weights, False, launches=True, alike=0.05)
