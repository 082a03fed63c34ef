"""Kernels of Triton, Numba, CUTLASS and cuTile in a jit, without their launchers.

Each compiles y = a x + b, and Triton a softmax, to PTX (cuTile to machine code). That
needs no GPU. What a launch needs to know comes from the compiler; then all of them are
called by `kernel_call`, a and b being traced.

    pip install triton 'numba-cuda[cu13]' nvidia-cutlass-dsl 'cuda-tile[tileiras]'
    python examples/other_compilers.py
    python examples/other_compilers.py --keep FOLDER --arch 90
    python examples/other_compilers.py --kept FOLDER

`--keep` writes what they made to a folder, `--arch` says for which GPU; `--kept`
compiles nothing, but takes such a folder. Compilers that are not installed are named.
Without a GPU the calls are traced and lowered for one.
"""

import argparse
import importlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_kvblock import kernels

THREADS = 256
ISA = 87  # PTX 8.7: drivers of CUDA 12.8 read it, and newer ones


class Compiled(NamedTuple):
    """A kernel, and beside it what its compiler's own launcher would know.

    sidecar: as `from_ptx` takes it; "elements" are those that a block computes.
    """

    name: str
    compiler: str
    image: str | bytes
    sidecar: dict[str, Any]


# ---- the compilers -------------------------------------------------------------------


def of_triton(arch: int) -> Iterator[Compiled]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def axpb(x, y, a, b, n, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = at < n
        tl.store(y + at, a * tl.load(x + at, mask=inside) + b, mask=inside)

    @triton.jit
    def softmax(x, y, scale, columns, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        inside = at < columns
        row = tl.program_id(0) * columns
        v = scale * tl.load(x + row + at, mask=inside, other=0)
        v = tl.where(inside, v, float("-inf"))
        v = tl.exp(v - tl.max(v, axis=0))
        tl.store(y + row + at, v / tl.sum(v, axis=0), mask=inside)

    triton.knobs.compilation.disable_line_info = True  # it has this machine's paths
    xy = {"x": "*fp32", "y": "*fp32"}
    for function, scalars in (
        (axpb, {"a": "fp32", "b": "fp32", "n": "i32"}),
        (softmax, {"scale": "fp32", "columns": "i32"}),
    ):
        made = triton.compile(
            ASTSource(
                function,
                {**xy, **scalars, "SIZE": "constexpr"},
                constexprs={"SIZE": 1024},
                # XLA's buffers begin at multiples of more than 16 bytes.
                attrs={(i,): [["tt.divisibility", 16]] for i in range(len(xy))},
            ),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": 4, "ptx_version": ISA, "enable_fp_fusion": True},
        )
        known = made.metadata
        if known.global_scratch_size or known.profile_scratch_size:
            raise NotImplementedError("a scratch buffer is one more result")
        beside = {
            "entryPoint": known.name,
            "blockSize": known.num_warps * known.warp_size,
            "sharedMemory": known.shared,
            "parameters": [*xy, *scalars, "global_scratch", "profile_scratch"],
            "elements": 1024,
        }
        compiler = f"Triton {triton.__version__}"
        yield Compiled(function.__name__, compiler, made.asm["ptx"], beside)


def of_numba(arch: int) -> Iterator[Compiled]:
    try:  # all that compiling imports
        importlib.import_module("numba.cuda.cudaimpl")
    except AttributeError as unknown:
        raise ImportError(f"it does not know this NumPy: {unknown}") from unknown
    from numba import cuda, float32, int32, types, void

    def axpb(x, y, a, b, n):
        i = cuda.grid(1)
        if i < n:
            y[i] = a * x[i] + b

    floats = types.CPointer(float32)  # an array would be seven parameters
    made, _ = cuda.compile(
        axpb,
        void(floats, floats, float32, float32, int32),
        device=False,
        abi="numba",  # of kernels the only one
        cc=divmod(arch, 10),
        launch_bounds=THREADS,
    )
    beside = {
        "blockSize": THREADS,
        "parameters": ["x", "y", "a", "b", "n"],
        "elements": THREADS,
    }
    compilers = [f"{n} {version(n)}" for n in ("numba-cuda", "nvidia-nvvm")]
    yield Compiled("axpb", " with ".join(compilers), made, beside)


def of_cutlass(arch: int) -> Iterator[Compiled]:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    @cute.kernel
    def axpb(
        x: cute.Pointer,
        y: cute.Pointer,
        a: cutlass.Float32,
        b: cutlass.Float32,
        n: cutlass.Int32,
    ):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < n:
            layout = cute.make_layout(n)
            value = a * cute.make_tensor(x, layout)[i] + b
            cute.make_tensor(y, layout)[i] = value

    @cute.jit
    def launch(
        x: cute.Pointer,
        y: cute.Pointer,
        a: cutlass.Float32,
        b: cutlass.Float32,
        n: cutlass.Int32,
    ):
        axpb(x, y, a, b, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    floats = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
    numbers = cutlass.Float32(0), cutlass.Float32(0), cutlass.Int32(0)
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:  # where it writes the PTX, too
        options = f"--keep-ptx --gpu-arch sm_{arch}{suffix} --dump-dir {folder}"
        made = cute.compile(launch, floats, floats, *numbers, options=options).__ptx__
    beside = {  # the block is in the PTX: .reqntid
        "parameters": ["x", "y", "a", "b", "n"],
        "elements": THREADS,
    }
    yield Compiled("axpb", f"CUTLASS DSL {cutlass.__version__}", made, beside)


def of_cutile(arch: int) -> Iterator[Compiled]:
    from cuda import tile as ct
    from cuda.tile import compilation as to

    # Machine code takes no traced scalars: a and b are arrays of one element.
    @ct.kernel
    def axpb(x, a, b, y, SIZE: ct.Constant):
        i = ct.bid(0)
        ct.store(y, i, ct.load(a, 0, 1) * ct.load(x, i, SIZE) + ct.load(b, 0, 1))

    floats = to.ArrayConstraint(
        ct.float32,
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(1,),
        base_addr_divisible_by=16,
    )
    signature = to.KernelSignature(
        [floats, floats, floats, floats, to.ConstantConstraint(THREADS)],
        to.CallingConvention.cutile_python_v2(),
        symbol="axpb",
    )
    made = io.BytesIO()
    to.export_kernel(
        axpb, [signature], made, gpu_code=f"sm_{arch}", output_format="cubin"
    )
    beside = {
        "entryPoint": signature.symbol,
        "blockSize": 1,  # as cuTile's own launcher says, whatever the tile
        "elements": THREADS,
    }
    yield Compiled("axpb", f"cuTile {version('cuda-tile')}", made.getvalue(), beside)


COMPILERS = {
    "triton": of_triton,
    "numba": of_numba,
    "cutlass": of_cutlass,
    "cutile": of_cutile,
}


# ---- the calls -----------------------------------------------------------------------


def kernel_of(made: Compiled) -> kernels.Kernel:
    if isinstance(made.image, bytes):
        return kernels.from_cubin(made.image, sidecar=made.sidecar)
    return kernels.from_ptx(made.image, sidecar=made.sidecar)


def call(made: Compiled) -> Callable[..., jax.Array]:
    """The kernel as a function of x and its scalars, in a jit."""
    kernel, elements = kernel_of(made), made.sidecar["elements"]

    def by_name(x: jax.Array, grid: int, **scalars: Any) -> jax.Array:
        rest = {p.name: 0 for p in kernel.parameters or () if "scratch" in str(p.name)}
        return kernels.kernel_call(
            kernel, x, out=x, scalars={**scalars, **rest}, grid=grid
        )

    @jax.jit
    def axpb(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return by_name(x, -(-x.size // elements), a=a, b=b, n=x.size)

    @jax.jit
    def softmax(x: jax.Array, scale: jax.Array) -> jax.Array:
        rows, columns = x.shape
        assert columns <= elements
        return by_name(x, rows, scale=scale, columns=columns)

    @jax.jit
    def axpb_of_cutile(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        numbers = {}
        for i, size in enumerate((x.size, 1, 1, x.size)):  # pointer, size, stride
            numbers |= {3 * i + 1: np.int32(size), 3 * i + 2: np.int32(1)}
        return kernels.kernel_call(
            kernel,
            x,
            a[None],
            b[None],
            out=x,
            scalars=numbers,
            grid=-(-x.size // elements),
        )

    if not kernel.is_ptx:
        return axpb_of_cutile
    return {"axpb": axpb, "softmax": softmax}[made.name]


def expected(name: str, x: jax.Array, *scalars: jax.Array) -> jax.Array:
    if name == "softmax":
        return jax.nn.softmax(scalars[0] * x, axis=1)
    return scalars[0] * x + scalars[1]


def arguments(name: str) -> tuple[jax.Array, list[tuple[np.float32, ...]]]:
    """x, and the scalars of some calls."""
    shape = (5, 777) if name == "softmax" else (3001,)
    x = jax.random.normal(jax.random.key(0), shape)
    count = 1 if name == "softmax" else 2
    values = np.linspace(-1, 2, 4 * count, dtype=np.float32).reshape(4, count)
    return x, [tuple(row) for row in values]


def check(made: Compiled, on_gpu: bool) -> str:
    """What was seen of a kernel. Raises where it computes something else."""
    kernel, run = kernel_of(made), call(made)
    x, calls = arguments(made.name)
    wanted = jax.eval_shape(lambda: expected(made.name, x, *calls[0]))
    shape = jax.eval_shape(run, x, *calls[0])
    assert (shape.shape, shape.dtype) == (wanted.shape, wanted.dtype)
    lowered = run.trace(x, *calls[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "kvblock_kernel_call" in lowered and kernel.name in lowered
    if not on_gpu:
        return "traced and lowered for a GPU; not run: there is none here"
    for scalars in calls:
        got = run(x, *scalars)
        np.testing.assert_allclose(
            got, expected(made.name, x, *scalars), rtol=1e-5, atol=1e-6
        )
    assert run._cache_size() == 1
    return f"as jnp, {len(calls)} values of its scalars by one compilation"


def show(made: Compiled) -> str:
    kernel = kernel_of(made)
    parameters = kernel.parameters
    if parameters is None:
        signature = "machine code"
    else:
        signature = ", ".join(f"{p.name} {p.type}" for p in parameters)
    x = 1 if kernel.block is None else int(np.prod(kernel.block))
    return (
        f"{made.compiler}, {made.name}: {signature}; "
        f"block {x}, {kernel.shared_memory} bytes of shared memory"
    )


# ---- a folder of what was compiled ---------------------------------------------------


def keep(made: Compiled, folder: Path, compiler: str, arch: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{compiler}_{made.name}"
    beside = {**made.sidecar, "name": made.name, "compiler": made.compiler}
    path.with_suffix(".json").write_text(json.dumps(beside, indent=1) + "\n")
    if isinstance(made.image, bytes):
        path.with_suffix(".cubin").write_bytes(made.image)
        return
    where = f"{made.name} of examples/{Path(__file__).name}, for sm_{arch}"
    text = made.image.strip("\0\n ")
    path.with_suffix(".ptx").write_text(f"// {made.compiler}: {where}\n{text}\n")


def kept(folder: Path) -> Iterator[Compiled]:
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text())
        text = path.with_suffix(".ptx")
        image = path.with_suffix(".cubin")
        code = text.read_text() if text.exists() else image.read_bytes()
        yield Compiled(known["name"], known["compiler"], code, known)


def compiled(arch: int, folder: Path | None) -> Iterator[Compiled]:
    for name, compile_all in COMPILERS.items():
        try:
            for made in compile_all(arch):
                if folder is not None:
                    keep(made, folder, name, arch)
                yield made
        except (ImportError, FileNotFoundError) as missing:  # the latter: tileiras
            print(f"{name}: not installed, or not for these packages ({missing})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of other compilers.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--kept", type=Path, metavar="FOLDER")
    parser.add_argument("--arch", type=int, metavar="80")
    given = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    arch = given.arch or 80
    if on_gpu and given.arch is None:
        arch = int(jax.devices()[0].compute_capability.replace(".", ""))
    for made in kept(given.kept) if given.kept else compiled(arch, given.keep):
        print(show(made))
        print(f"  {check(made, on_gpu)}")


if __name__ == "__main__":
    main()
