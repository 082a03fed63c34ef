"""Writes the PTX of other compilers that tests/kernels/test_other_compilers.py reads.

    pip install triton 'numba-cuda[cu13]' nvidia-cutlass-dsl nvidia-nvvm==13.0.*
    python tests/support/foreign_ptx.py

It is kept in tests/support/ptx, so that the tests need none of these. Here are kernels
that take a scalar of each type that their compiler has; those of
examples/other_compilers.py come from `--keep`. nvidia-nvvm is of the oldest toolkit
whose assembler the tests may meet, since newer ones write a newer PTX.
"""

import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "ptx"
ISA = 88


def of_triton() -> str:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def every(
        x, y, half, brain, flag, byte, short, word, unsigned, long, natural, double
    ):
        at = tl.arange(0, 128)
        value = half.to(tl.float32) + brain.to(tl.float32) + flag.to(tl.float32)
        value += byte.to(tl.float32) + short.to(tl.float32) + word.to(tl.float32)
        value += unsigned.to(tl.float32) + long.to(tl.float32)
        value += natural.to(tl.float32) + double.to(tl.float32)
        tl.store(y + at, tl.load(x + at) + value)

    triton.knobs.compilation.disable_line_info = True
    types = (
        *("*fp32", "*fp32", "fp16", "bf16", "i1", "u8", "i16", "i32", "u32", "i64"),
        *("u64", "fp64"),
    )
    signature = dict(zip(every.arg_names, types, strict=True))
    source = ASTSource(every, signature)
    options = {"num_warps": 4, "ptx_version": ISA, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    return made.asm["ptx"]


def of_numba() -> str:
    from numba import boolean, cuda, types, void

    def every(
        x, y, half, flag, byte, short, word, unsigned, long, natural, single, double
    ):
        i = cuda.grid(1)
        if i < x.size:
            value = flag + byte + short + word + unsigned + long + natural
            y[i] = x[i] + value + single + double + types.float32(half)

    array = types.Array(types.float32, 1, "C")
    signature = void(
        *(array, array, types.float16, boolean, types.uint8, types.int16),
        *(types.int32, types.uint32, types.int64, types.uint64),
        *(types.float32, types.float64),
    )
    made, _ = cuda.compile(every, signature, device=False, abi="numba", cc=(8, 0))
    return made


def of_cutlass() -> str:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    kinds = {
        "half": cutlass.Float16,
        "brain": cutlass.BFloat16,
        "flag": cutlass.Boolean,
        "byte": cutlass.Uint8,
        "short": cutlass.Int16,
        "word": cutlass.Int32,
        "unsigned": cutlass.Uint32,
        "long": cutlass.Int64,
        "natural": cutlass.Uint64,
        "single": cutlass.Float32,
        "double": cutlass.Float64,
    }

    @cute.kernel
    def every(
        x: cute.Tensor,
        y: cute.Tensor,
        half: cutlass.Float16,
        brain: cutlass.BFloat16,
        flag: cutlass.Boolean,
        byte: cutlass.Uint8,
        short: cutlass.Int16,
        word: cutlass.Int32,
        unsigned: cutlass.Uint32,
        long: cutlass.Int64,
        natural: cutlass.Uint64,
        single: cutlass.Float32,
        double: cutlass.Float64,
    ):
        i = cute.arch.thread_idx()[0]
        to = cutlass.Float32
        value = half.to(to) + brain.to(to) + byte.to(to) + short.to(to) + word.to(to)
        value += unsigned.to(to) + long.to(to) + natural.to(to) + single
        value += double.to(to)
        if flag:
            value += 1.0
        y[i] = x[i] + value

    @cute.jit
    def launch(
        x: cute.Tensor,
        y: cute.Tensor,
        half: cutlass.Float16,
        brain: cutlass.BFloat16,
        flag: cutlass.Boolean,
        byte: cutlass.Uint8,
        short: cutlass.Int16,
        word: cutlass.Int32,
        unsigned: cutlass.Uint32,
        long: cutlass.Int64,
        natural: cutlass.Uint64,
        single: cutlass.Float32,
        double: cutlass.Float64,
    ):
        numbers = (half, brain, flag, byte, short, word, unsigned, long, natural)
        every(x, y, *numbers, single, double).launch(grid=(1, 1, 1), block=(128, 1, 1))

    tensor = make_fake_compact_tensor(cutlass.Float32, (128,))
    numbers = [kind(0) for kind in kinds.values()]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --gpu-arch sm_80 --dump-dir {folder}"
        made = cute.compile(launch, tensor, tensor, *numbers, options=options)
        return made.__ptx__


def texts() -> Iterator[tuple[str, str, str]]:
    """The file's name, who made it, and the PTX."""
    yield "triton_every", f"Triton {version('triton')}", of_triton()
    compilers = [f"{n} {version(n)}" for n in ("numba-cuda", "nvidia-nvvm")]
    yield "numba_every", " with ".join(compilers), of_numba()
    yield "cutlass_every", f"CUTLASS DSL {version('nvidia-cutlass-dsl')}", of_cutlass()


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import other_compilers

    for name in ("triton", "numba", "cutlass"):  # cuTile has no PTX
        for made in other_compilers.COMPILERS[name](80):
            other_compilers.keep(made, FOLDER, name, 80)
    here = Path(__file__).relative_to(ROOT)
    for name, compiler, text in texts():
        said = f"// {compiler}: every of {here}, for sm_80\n"
        text = text.strip("\0\n ")
        (FOLDER / f"{name}.ptx").write_text(f"{said}{text}\n")


if __name__ == "__main__":
    main()
