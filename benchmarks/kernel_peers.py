#!/usr/bin/env python3
"""Asks other ways to call a kernel from JAX for what `kernel_call` offers.

    pip install jax-triton warp-lang jax-tvm-ffi nvidia-cutlass-dsl
    pip install 'cuda-tile[tileiras]'
    JAX_PLATFORMS=cpu python benchmarks/kernel_peers.py

Each has y = a x + 1 in a jit, and answers by doing it or by its own error, as far as
that goes without a GPU: what is traced, what is lowered for one, what CPUs run.
docs/kernels_peers.md has what came out, and what was read in their sources. Those that
are not installed are named.
"""

import os
import re

# Before jax starts. Four devices; what CUTLASS compiles for where it finds no GPU.
_FLAGS = (os.environ.get("XLA_FLAGS"), "--xla_force_host_platform_device_count=4")
os.environ["XLA_FLAGS"] = " ".join(filter(None, _FLAGS))
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

N, BLOCK = 1024, 256
LONGEST = 400  # letters of an answer


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to call a kernel.

    call: of x and a number a. from_array: of x and an array of one element, where the
    kernel is written for that. options: what else it offers for a question. on_cpus:
    the package to import, where CPUs run its kernels themselves.
    """

    name: str
    call: Callable[..., Any]
    from_array: Callable[..., Any] | None = None
    options: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    on_cpus: str | None = None


# ---- who is asked --------------------------------------------------------------------


def ours() -> Peer:
    from jax_kvblock import kernels

    folder = Path(__file__).parents[1] / "tests/support/ptx"
    kernel = kernels.from_ptx(folder / "triton_axpb.ptx")

    def call(x: Any, a: Any, **options: Any) -> Any:
        scalars = {"a": a, "b": 1.0, "n": x.size}
        scalars |= {"global_scratch": 0, "profile_scratch": 0}
        options = {"grid": -(-x.size // BLOCK)} | options
        return kernels.kernel_call(kernel, x, out=x, scalars=scalars, **options)

    return Peer(
        "jax_kvblock",
        call,
        options={
            "vmap": lambda x, a: call(x, a, batch="sequential"),
            "grad": lambda x, a: call(x, a, vjp=lambda arrays, y, c: (a * c,)),
            "mesh": lambda x, a: call(x, a, sharding="i -> i", grid=lambda x: x.size),
            "CPU": lambda x, a: call(x, a, fallback=lambda x, a, b, *rest: a * x + b),
        },
    )


def jax_triton() -> Peer:
    import jax_triton
    import triton
    import triton.language as tl

    @triton.jit
    def axpb(x, a, y, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y + at, a * tl.load(x + at) + 1.0)

    @triton.jit
    def axpb_from_array(x, a, y, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y + at, tl.load(a) * tl.load(x + at) + 1.0)

    def call(x: Any, a: Any, kernel: Any = axpb) -> Any:
        return jax_triton.triton_call(
            x,
            a,
            kernel=kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.size // BLOCK,),
            SIZE=BLOCK,
            compute_capability=90,  # else it asks a GPU
        )

    name = f"jax-triton {version('jax-triton')}, Triton {version('triton')}"
    return Peer(name, call, lambda x, a: call(x, a, axpb_from_array))


def warp_kernel() -> Peer:
    import warp as wp

    wp.config.quiet = True

    @wp.kernel
    def axpb(x: wp.array(dtype=float), a: float, y: wp.array(dtype=float)):
        i = wp.tid()
        y[i] = a * x[i] + 1.0

    @wp.kernel
    def axpb_from_array(
        x: wp.array(dtype=float), a: wp.array(dtype=float), y: wp.array(dtype=float)
    ):
        i = wp.tid()
        y[i] = a[0] * x[i] + 1.0

    kernel, from_array = wp.jax_kernel(axpb), wp.jax_kernel(axpb_from_array)
    with_derivative = wp.jax_kernel(axpb, enable_backward=True)
    return Peer(
        f"Warp {version('warp-lang')}",
        lambda x, a: kernel(x, a)[0],
        lambda x, a: from_array(x, a)[0],
        {"grad": lambda x, a: with_derivative(x, a)[0]},
        on_cpus="warp",
    )


def tvm_ffi() -> Peer:
    import jax_tvm_ffi
    import tvm_ffi

    def axpb(x: Any, y: Any, a: Any) -> None:
        np.from_dlpack(y)[...] = a * np.from_dlpack(x) + 1

    def axpb_from_array(x: Any, a: Any, y: Any) -> None:
        np.from_dlpack(y)[...] = np.from_dlpack(a) * np.from_dlpack(x) + 1

    for name, function, takes in (
        ("axpb", axpb, ["args", "rets", "attrs.a"]),
        ("axpb_from_array", axpb_from_array, ["args", "rets"]),
    ):
        for platform in ("cpu", "gpu"):
            jax_tvm_ffi.register_ffi_target(
                name,
                tvm_ffi.convert(function),
                arg_spec=takes,
                platform=platform,
                pass_owned_tensor=True,
            )

    def call(name: str, x: Any, *rest: Any, method: str | None = None, **a: Any) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call(name, result, vmap_method=method)(x, *rest, **a)

    return Peer(
        f"jax-tvm-ffi {version('jax-tvm-ffi')}",
        lambda x, a: call("axpb", x, a=a),
        lambda x, a: call("axpb_from_array", x, a),
        {"vmap": lambda x, a: call("axpb", x, a=a, method="sequential")},
        on_cpus="jax_tvm_ffi",
    )


def cutile() -> Peer:
    import cuda.tile as ct
    import cuda.tile._compile as compiler
    from cuda.tile.jax import OutputPlaceholder, cutile_call

    if jax.default_backend() != "gpu":
        compiler.get_sm_arch = lambda: "sm_90"  # there is no GPU to ask

    @ct.kernel
    def axpb(x, a, y, SIZE: ct.Constant):
        i = ct.bid(0)
        ct.store(y, i, a * ct.load(x, i, SIZE) + 1.0)

    @ct.kernel
    def axpb_from_array(x, a, y, SIZE: ct.Constant):
        i = ct.bid(0)
        ct.store(y, i, ct.load(a, 0, 1) * ct.load(x, i, SIZE) + 1.0)

    def call(x: Any, a: Any, kernel: Any = axpb) -> Any:
        y = OutputPlaceholder(x.shape, x.dtype)
        return cutile_call((x.size // BLOCK,), kernel, (x, a, y, BLOCK))

    name = f"cuTile {version('cuda-tile')}"
    return Peer(name, call, lambda x, a: call(x, a, axpb_from_array))


def cutlass_dsl() -> Peer:
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import cute
    from cutlass.jax import cutlass_call

    @cute.kernel
    def axpb(x, y, a):
        i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        y[i] = a * x[i] + 1.0

    @cute.jit
    def launch(
        stream: cuda.CUstream, x: cute.Tensor, y: cute.Tensor, *, a: cutlass.Constexpr
    ):
        grid = (cute.size(x) // BLOCK, 1, 1)
        axpb(x, y, a).launch(grid=grid, block=(BLOCK, 1, 1), stream=stream)

    @cute.kernel
    def axpb_from_array(x, a, y):
        i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        y[i] = a[0] * x[i] + 1.0

    @cute.jit
    def launch_from_array(
        stream: cuda.CUstream, x: cute.Tensor, a: cute.Tensor, y: cute.Tensor
    ):
        grid = (cute.size(x) // BLOCK, 1, 1)
        launched = axpb_from_array(x, a, y)
        launched.launch(grid=grid, block=(BLOCK, 1, 1), stream=stream)

    def call(function: Any, x: Any, *rest: Any, **constants: Any) -> Any:
        y = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return cutlass_call(function, output_shape_dtype=y, **constants)(x, *rest)

    name = f"CUTLASS DSL {version('nvidia-cutlass-dsl')}"
    return Peer(
        name,
        lambda x, a: call(launch, x, a=a),
        lambda x, a: call(launch_from_array, x, a),
    )


PEERS = {
    "jax_kvblock": ours,
    "jax-triton": jax_triton,
    "Warp": warp_kernel,
    "jax-tvm-ffi": tvm_ffi,
    "cuTile": cutile,
    "CUTLASS": cutlass_dsl,
}


# ---- what they are asked -------------------------------------------------------------


def on_gpu(function: Any, *operands: Any) -> str:
    """The program of a function for a GPU, which is not here."""
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


def gathers(program: str) -> str:
    return "all-gather" if "all-gather" in program else "no all-gather"


def questions(peer: Peer) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, a, number = jnp.arange(N, dtype=jnp.float32), jnp.float32(2), 2.0

    def run(x: Any) -> Any:
        return peer.call(x, number)

    def offered(question: str) -> Callable[[Any], Any]:
        call = peer.options.get(question, peer.call)
        return lambda x: call(x, number)

    def by_value() -> str:
        on_gpu(peer.call, x, a)
        return "lowered"

    def programs() -> str:
        """For 100 values of a, as an array where it may be one, else as a number."""
        traced = 0

        def counted(x: Any, a: Any) -> Any:
            nonlocal traced
            traced += 1
            return peer.call(x, a)

        try:
            jax.eval_shape(peer.call, x, a)
            on_gpu(peer.call, x, a)
            program = jax.jit(counted)
        except Exception:
            program = jax.jit(counted, static_argnums=1)
        for value in np.linspace(0, 1, 100).tolist():
            program.trace(x, value)
        return str(traced)

    def from_array() -> str:
        on_gpu(peer.from_array, x, a[None])
        return "lowered"

    def batched(function: Callable[[Any], Any]) -> str:
        jax.make_jaxpr(jax.vmap(function))(jnp.ones((3, N)))
        return "traced"

    def differentiated(function: Callable[[Any], Any]) -> str:
        jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(x)
        return "traced"

    def type_on_mesh() -> str:
        with jax.set_mesh(mesh(AxisType.Explicit)):
            part = jax.device_put(x, P("d"))
            result = jax.jit(offered("mesh")).trace(part).out_info
        spec = result.sharding.spec if result.sharding is not None else None
        return f"x is cut by P('d'), the result by {spec}"

    def gathered() -> str:
        part = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P("d")))
        return gathers(jax.jit(run).lower(part).compile().as_text())

    def in_parts() -> str:
        specs = {"in_specs": P("d"), "out_specs": P("d")}
        parts = jax.shard_map(run, mesh=mesh(AxisType.Auto), **specs)
        jax.make_jaxpr(parts)(x)
        try:
            on_gpu(parts, jax.ShapeDtypeStruct((4 * N,), jnp.float32))
        except AttributeError as error:  # jax-triton's next step is a GPU's
            return f"traced; {error}"
        if peer.on_cpus is None:
            return "lowered"
        program = jax.jit(parts).lower(x).compile()
        program(jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P("d"))))
        return f"ran, {gathers(program.as_text())}"

    def export(platform: str, checked: bool) -> bytearray:
        checks = []
        if not checked:
            (target,) = set(re.findall(r"custom_call @(\w+)", on_gpu(run, x)))
            checks = [jax.export.DisabledSafetyCheck.custom_call(target)]
        made = jax.export.export(
            jax.jit(run), platforms=[platform], disabled_checks=checks
        )
        return made(x).serialize()

    def exported(checked: bool) -> str:
        return f"{len(export('cuda', checked))} bytes"

    def elsewhere() -> str:
        with tempfile.NamedTemporaryFile() as file:
            file.write(export("cpu", checked=False))
            file.flush()
            code = (
                f"import jax.export, {peer.on_cpus}\n"
                f"program = jax.export.deserialize(open({file.name!r}, 'rb').read())\n"
                f"print(program.call(jax.numpy.arange({N}, dtype='float32'))[:4])"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True
            )
        errors = re.findall(r"^\S*Error: .*$", done.stderr, re.MULTILINE)
        return errors[-1] if done.returncode else done.stdout.splitlines()[-1]

    def branches() -> Any:
        def either(x: Any) -> Any:
            return jax.lax.platform_dependent(
                x, cuda=run, default=lambda x: number * x + 1
            )

        return jax.jit(either)(x)[:4]

    yield "a traced scalar", by_value
    yield "programs for 100 values of it", programs
    if peer.from_array is not None:
        yield "an array of one element instead", from_array
    for name, ask in (("vmap", batched), ("grad", differentiated)):
        yield name, lambda ask=ask: ask(run)
        if name in peer.options:
            option = offered(name)
            yield f"{name}, as it offers", lambda ask=ask, option=option: ask(option)
    yield "a result's type on a mesh", type_on_mesh
    if peer.on_cpus:
        yield "x is cut over four CPU devices", gathered
    yield "shard_map", in_parts
    yield "export", lambda: exported(checked=True)
    yield "export, its check off", lambda: exported(checked=False)
    if peer.on_cpus:
        yield "export for a CPU, called by another process", elsewhere
    yield "on a CPU", lambda: jax.jit(offered("CPU"))(x)[:4]
    yield "on a CPU, platform_dependent", branches


def answer(ask: Callable[[], Any]) -> str:
    try:
        said = str(ask())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return re.sub(r"\s+", " ", said)[:LONGEST]


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks other ways to call a kernel.")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=[*PEERS])
    warnings.simplefilter("ignore")
    print(f"jax {jax.__version__} on {jax.default_backend()}")
    for name in parser.parse_args().only:
        try:
            peer = PEERS[name]()
        except ImportError as missing:
            print(f"\n{name}: not installed ({missing})")
            continue
        print(f"\n{peer.name}")
        for question, ask in questions(peer):
            print(f"  {question}: {answer(ask)}")


if __name__ == "__main__":
    main()
