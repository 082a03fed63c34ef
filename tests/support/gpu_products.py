"""What products an NVIDIA GPU would run; compiled where none is.

Run as a script with a CUDA plugin of JAX on the path, it compiles cases of `CASES` for
an H100 and prints for each its name, how many products it has in 8 bits and in more,
how many of them are cuBLASLt's, how many add up in full, as gradients are to, and how
often it calls the kernel of norms; whether products of one row round; and how many
products in 8 bits models have in the trainer.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver

import gpu_schedules
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.fusion import TransformerBlock
from jax_kvblock.layers import AttentionLayer
from jax_kvblock.training import (
    FP8Config,
    Fp8Scaling,
    fp8_dot,
    fp8_dot_general,
    fp8_norm_dot,
    fp8_training,
)
from jax_kvblock.training.compiled import count_products
from jax_kvblock.training.loss import mean_loss
from jax_kvblock.training.nnx import convert_model_to_fp8
from jax_kvblock.training.trainer import _differentiate, _split

# XLA takes cuBLASLt of 8 bits by the version of CUDA.
WITH_VERSIONS = gpu_schedules.H100.replace(
    "gpu_device_info {",
    'gpu_device_info { runtime_version: "13.0.0" driver_version: "13.0.0" '
    'compile_time_toolkit_version: "13.0.0"',
)
BF16, F32 = jnp.bfloat16, jnp.float32
DELAYED = FP8Config()


def both(config: FP8Config, x: Any, w: Any, scaling: Any, d_out: Any) -> Any:
    """A product and its gradients."""
    dot = functools.partial(fp8_dot, config=config)
    out, pull = jax.vjp(dot, x, w, scaling)
    return out, pull(d_out)


def product(
    config: FP8Config = DELAYED, rows: Any = (512,), inner: int = 256,
    columns: int = 384, dtype: Any = BF16, w_dtype: Any = F32,
) -> Any:  # fmt: skip
    scaling = None
    if config.scaling == "delayed":
        scaling = jax.eval_shape(lambda: Fp8Scaling.create(config))
    shape = jax.ShapeDtypeStruct
    return functools.partial(both, config), (
        shape((*rows, inner), dtype), shape((inner, columns), w_dtype), scaling,
        shape((*rows, columns), dtype),
    )  # fmt: skip


def normed(dtype: Any = BF16, residual: bool = True, **config: Any) -> Any:
    """A norm, a product and their gradients."""
    of = FP8Config(**config)
    scaling = None
    if of.scaling == "delayed":
        scaling = jax.eval_shape(lambda: Fp8Scaling.create(of))

    def run(x: Any, other: Any, gamma: Any, w: Any, scaling: Any, d_out: Any) -> Any:
        def dot(x: Any, other: Any, gamma: Any, w: Any, scaling: Any) -> Any:
            return fp8_norm_dot(x, gamma, w, scaling, of, residual=other)

        out, pull = jax.vjp(dot, x, other, gamma, w, scaling)
        return out, pull((d_out, x) if residual else d_out)

    shape = jax.ShapeDtypeStruct
    x = shape((4, 128, 256), dtype)
    return run, (
        x, x if residual else None, shape((256,), F32), shape((256, 384), F32),
        scaling, shape((4, 128, 384), dtype),
    )  # fmt: skip


def heads() -> Any:
    """Into heads and out of them again, as attention's projections are."""
    scaling = jax.eval_shape(Fp8Scaling.create)
    into, out_of = (((2,), (0,)), ((), ())), (((2, 3), (0, 1)), ((), ()))

    def loss(x: Any, w: Any, v: Any, first: Any, second: Any) -> Any:
        h = fp8_dot_general(x, w, into, scaling=first)
        out = fp8_dot_general(jnp.sin(h), v, out_of, scaling=second)
        return jnp.sum(out.astype(F32) ** 2)

    shape = jax.ShapeDtypeStruct
    return jax.grad(loss, argnums=range(5)), (
        shape((4, 128, 256), BF16), shape((256, 4, 64), F32), shape((4, 64, 256), F32),
        scaling, scaling,
    )  # fmt: skip


def members() -> Any:
    """A product for each of four members, with weights of their own."""
    scaling = jax.eval_shape(lambda: Fp8Scaling.create(layers=(4,)))
    shape = jax.ShapeDtypeStruct
    return jax.vmap(functools.partial(both, DELAYED)), (
        shape((4, 512, 256), BF16), shape((4, 256, 384), F32), scaling,
        shape((4, 512, 384), BF16),
    )  # fmt: skip


class Sgd:
    """An optimizer without a state."""

    def init(self, params: Any) -> None:
        return None

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda g: -0.1 * g, grads), state


def layers() -> Any:
    """A step of three stacked layers by scan, remat and all."""

    def loss(params: Any, scalings: Any, x: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            (up, down), (first, second) = own
            return x + fp8_dot(jax.nn.gelu(fp8_dot(x, up, first)), down, second), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (params, scalings))
        return jnp.mean(x.astype(F32) ** 2)

    training = fp8_training(loss, Sgd())
    scalings = (Fp8Scaling.create(layers=(3,)),) * 2
    params = (jnp.zeros((3, 256, 512)), jnp.zeros((3, 512, 256)))
    state = jax.eval_shape(training.init, params, scalings)
    return training.train_step, (state, jax.ShapeDtypeStruct((4, 64, 256), BF16))


def two_layers() -> Any:
    """The training that docs/fp8_training.md begins with, in the same sizes."""

    def loss(params: Any, scalings: Any, batch: Any) -> Any:
        x, y = batch
        h = jax.nn.gelu(fp8_dot(x, params["up"], scalings["up"]))
        out = fp8_dot(h, params["down"], scalings["down"])
        return jnp.mean((out.astype(F32) - y) ** 2)

    training = fp8_training(loss, Sgd())
    params = {"up": jnp.zeros((256, 1024)), "down": jnp.zeros((1024, 256))}
    scalings = {name: Fp8Scaling.create() for name in params}
    state = jax.eval_shape(training.init, params, scalings)
    shape = jax.ShapeDtypeStruct
    return training.train_step, (
        state,
        (shape((512, 256), BF16), shape((512, 256), F32)),
    )


def linear_layers() -> Any:
    """A model of flax.nnx that was converted, and its gradients."""
    model = nnx.Sequential(
        nnx.Linear(256, 512, rngs=nnx.Rngs(0)),
        jax.nn.gelu,
        nnx.Linear(512, 256, rngs=nnx.Rngs(1)),
    )
    graph, state = nnx.split(convert_model_to_fp8(model))

    def loss(state: Any, x: Any) -> Any:
        return jnp.mean(nnx.merge(graph, state)(x).astype(F32) ** 2)

    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), state)
    grad = jax.grad(loss, allow_int=True)
    return grad, (shapes, jax.ShapeDtypeStruct((4, 128, 256), BF16))


def trained(make: Callable[[], nnx.Module]) -> Any:
    """What the trainer compiles of a call of `training_step`."""
    graph, *states = _split(convert_model_to_fp8(make()))
    run = functools.partial(_differentiate, mean_loss, graph)
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), states)
    x = jax.ShapeDtypeStruct((2, 128, 256), BF16)
    return run, (*shapes, x, jax.ShapeDtypeStruct(x.shape, F32))


def flax_attention() -> nnx.Module:
    return nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(0))


def own_attention() -> nnx.Module:
    return AttentionLayer(256, 4, 0.0, rngs=nnx.Rngs(0))


def own_block() -> nnx.Module:
    return TransformerBlock(256, 4, rngs=nnx.Rngs(0))


CAST_KERNEL = "cast by a kernel"
NORM_KERNEL = "normed by a kernel"  # of compute capability 9.0
# By name: what makes a function and the shapes of its operands, and the products.
CASES: dict[str, tuple[Any, int]] = {
    "delayed": (product, 3),
    "current": (functools.partial(product, FP8Config(scaling="current")), 3),
    "e4m3 backward": (functools.partial(product, FP8Config("e4m3", "e4m3")), 3),
    "float32": (functools.partial(product, dtype=F32), 3),
    "float16": (functools.partial(product, dtype=jnp.float16, w_dtype=jnp.float16), 3),
    "float16 and float32": (functools.partial(product, dtype=jnp.float16), 3),
    "rows of rows": (functools.partial(product, rows=(4, 96)), 3),
    "heads": (heads, 6),
    "members": (members, 3),
    "sizes that are padded": (
        functools.partial(product, rows=(500,), inner=250, columns=390), 3,
    ),
    "normed": (normed, 3),
    "normed, current": (functools.partial(normed, scaling="current"), 3),
    "normed, float32": (functools.partial(normed, F32, residual=False), 3),
    CAST_KERNEL: (functools.partial(product, FP8Config(implementation="cuda")), 3),
    NORM_KERNEL: (functools.partial(normed, implementation="cuda"), 3),
    # Two forward, the first again for what the gradients need, and their four.
    "layers": (layers, 7),
    # Nobody asks for the gradient of the inputs, so that it is 5 and not 6.
    "two layers": (two_layers, 5),
    "linear layers": (linear_layers, 5),
}  # fmt: skip


# By name: a model with attention, and its products with weights. Those of its scores
# are not of 8 bits, and a kernel's where one serves them.
MODELS: dict[str, tuple[Any, int]] = {
    "attention of flax": (functools.partial(trained, flax_attention), 9),
    "attention": (functools.partial(trained, own_attention), 5),
    "a block": (functools.partial(trained, own_block), 18),
}
AS_JIT_IS = ("heads", "layers", "two layers", "linear layers")
# The kernels write both orders of what they cast: nothing of 8 bits is laid otherwise.
BOTH_ORDERS = (CAST_KERNEL, NORM_KERNEL)
# Of one row no library multiplies: XLA does, number by number. Rows, inner, columns.
ONE_ROW = {"one row": (1, 130, 3), "a number": (1, 1, 1)}
CASES_OF_ONE_ROW = {
    name: (functools.partial(product, rows=(rows,), inner=inner, columns=columns), 0)
    for name, (rows, inner, columns) in ONE_ROW.items()
}


def compile_for(device: Any, name: str, of_library: bool = True) -> Any:
    make, _ = (CASES | CASES_OF_ONE_ROW | MODELS)[name]
    f, shapes = make()
    place = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
    )
    lowered = jax.jit(f).lower(*shapes)
    if not of_library:
        return lowered.compile()
    # Else XLA's own kernels take part, and the fastest of all is chosen on a GPU.
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def line_of(name: str, compiled: Any) -> str:
    count = count_products(compiled)
    text = compiled.as_text()
    library = text.count('"__cublas$lt$matmul$f8"')
    exact = text.count('"operand_precision":["HIGHEST","HIGHEST"]')
    norms = text.count('"kvblock_norm_cast"')
    return f"{name}: {count.narrow} {count.wide} {library} {exact} {norms}"


def laid_otherwise(compiled: Any) -> int:
    """How many arrays of 8 bits are transposed or copied."""
    moved = r"= f8e\w+\[[\d,]+\](\{[^}]*\})? (transpose|copy)\("
    return len(re.findall(moved, compiled.as_text()))


def are_rounded(name: str, compiled: Any) -> bool:
    """Whether x, w and d_out are there in 8 bits, by how many numbers they have."""
    rows, inner, columns = ONE_ROW[name]
    found = {
        form: {
            math.prod(map(int, filter(None, dims.split(","))))
            for dims in re.findall(rf"{form}\[([\d,]*)\]", compiled.as_text())
        }
        for form in ("f8e4m3fn", "f8e5m2")
    }
    sizes = {"f8e4m3fn": {rows * inner, inner * columns}, "f8e5m2": {rows * columns}}
    return all(sizes[form] <= found[form] for form in sizes)


def wanted(name: str) -> str:
    n = CASES[name][1]
    exact = {3: 2, 5: 3}.get(n, 4)  # two of each layer, but inputs' gradients
    return f"{name}: {n} 0 {n} {exact} {int(name == NORM_KERNEL)}"


if __name__ == "__main__":
    gpu_schedules.register_stand_ins()
    gpu_schedules.register_stand_ins(("cast", "norm_cast"))
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=WITH_VERSIONS, topology="1x1x1"
    )
    (h100,) = topology.devices
    for case in sys.argv[1:]:
        print(line_of(case, compile_for(h100, case)))
    for case in BOTH_ORDERS:
        print(f"{case}: laid otherwise {laid_otherwise(compile_for(h100, case))}")
    for case in ONE_ROW:
        print(f"{case}: rounded {are_rounded(case, compile_for(h100, case))}")
    for case in MODELS:
        print(f"{case}: weights {count_products(compile_for(h100, case)).narrow}")
    for case in AS_JIT_IS:
        count = count_products(compile_for(h100, case, of_library=False))
        print(f"{case}, as jit is: {count.narrow} {count.wide}")
