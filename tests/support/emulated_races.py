"""Kernels on the emulator with its race checker, emulator/races.cc.

    python emulated_races.py LIBRARY CASES

Runs those of CASES whose names begin so, with a library that `build` has made. Says
which accesses to shared memory nothing orders, and where results are wrong.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attention_launches
import cast_launches
import norm_cast_launches
import numpy as np
import quantize_launches
import select_launches
from append_launches import Guarded
from cpp_programs import compile_each
from emulated_attention import PARTS, ROOT, SOURCES, limits
from paged_problems import Case, HostMemory, Problem, run_on_host

EMULATOR = ROOT / "tests/support/emulator"
# What other kernels than attention's are linked with.
OTHERS = {
    name: (f"cpp/host/{name}_check.cc", "cpp/host/message.cc")
    for name in ("cast", "norm_cast", "quantize", "select")
}

CHECKED = {"sm90": PARTS["sm90"]}  # more files with kernels


def build(root: Path, library: Path, kernels: str = "attention") -> None:
    """The library with the kernels below `root`; kernels: a source of the emulator."""
    if kernels == "sm90":
        root = without_dropped_products(root, library.with_suffix(".sources"))
    folders = [EMULATOR, root / "cpp", root / "cpp/include"]
    sources = [root / source for source in OTHERS.get(kernels, SOURCES)]
    checked = [EMULATOR / f"{name}.cc" for name in (kernels, *CHECKED.get(kernels, ()))]
    others = [*sources, *limits(kernels), "-shared"]
    compile_checked(checked, library, folders, others)


# Products whose sums are dropped, and where they are not.
DROPPED = (
    ("split_keys", "SumOverKeys(dq, DsOf(step));", "has_dq"),
    ("split_products", "SumOverKeys<0>(dq, DsOf(step));", "step > 1"),
    ("split_products", "SumOverKeys<0>(dq, DsOf(step + 1));", "step > 0"),
    ("split_products", "SumOverKeys<1>(dq, DsOf(step + 1));", "step > 0"),
    ("split_products_cluster", "      SumOverKeys(dq);", "step > 0"),
)


def without_dropped_products(root: Path, to: Path) -> Path:
    """A copy of the kernels.

    Where there is no dQ, at a kernel's first steps and in calls without it, it
    multiplies what lies there and drops the sums, rather than have a branch. That meets
    those who write there.
    """
    shutil.rmtree(to, ignore_errors=True)  # of a build that failed
    shutil.copytree(root / "cpp", to / "cpp")
    for name, multiplies, condition in DROPPED:
        file = to / f"cpp/ops/attention/hopper/backward/{name}.cuh"
        text = file.read_text()
        assert multiplies in text, f"{name} has changed: {multiplies}"
        file.write_text(text.replace(multiplies, f"if ({condition}) {multiplies}"))
    return to


def compile_checked(
    kernels: list[Path], made: Path, folders: list[Path], others: list[Path | str]
) -> None:
    """The kernels' files are instrumented, the checker and other sources are not."""
    command = ["g++", "-std=c++17", "-O1", "-g1", "-fPIC", "-Wno-unknown-pragmas"]
    command += ["-fno-omit-frame-pointer"]
    # Some compilers check copies of memory, by functions whose accesses nobody sees.
    command += ["-U_FORTIFY_SOURCE"]
    # Shared memory is this library's, whatever others are loaded beside it.
    command += ["-fno-gnu-unique", "-DKVBLOCK_CHECK_RACES=1"]
    command += [*(f"-I{f}" for f in folders)]
    command += [x for x in map(str, others) if x.startswith("-D")]
    accesses = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
    objects = compile_each([*command, *accesses], kernels, made)
    subprocess.run(
        [*command, *objects, EMULATOR / "races.cc", *others, "-ldl", "-o", made],
        check=True,
    )


# ---- cases: each takes a library --------------------------------------------------


class HostArrays(attention_launches.Arrays):
    """As those on a GPU."""

    def __init__(self) -> None:
        self.memory = HostMemory()

    def empty(self, size: int) -> int:
        return self.memory.empty(size).ctypes.data

    def of(self, values: np.ndarray) -> int:
        return self.memory.give(values)

    def free(self) -> None:
        assert self.memory.untouched(), "a write beside an array"


def dense(option: Callable, library: ctypes.CDLL) -> None:
    """Both passes of the generic kernels; a sanitizer on a GPU runs the same."""
    attention_launches.Arrays = HostArrays  # type: ignore[misc]
    attention_launches.driver = lambda *_: None
    bf16 = attention_launches.BF16
    attention_launches.run(library, "generic", option, "64x64", bf16)


def float32(option: Callable, dims: str, library: ctypes.CDLL) -> None:
    """The same of float32; narrow heads have two stages forward, wide ones one."""
    attention_launches.Arrays = HostArrays  # type: ignore[misc]
    attention_launches.driver = lambda *_: None
    how = attention_launches.F32, attention_launches.DEFAULT
    attention_launches.run(library, "generic", option, dims, *how)


def narrow(option: Callable, library: ctypes.CDLL) -> None:
    """Hopper's forward kernel in 8 bits: in e4m3, and with integers."""
    attention_launches.Arrays = HostArrays  # type: ignore[misc]
    attention_launches.driver = lambda *_: None
    for dtype in (attention_launches.E4M3, attention_launches.I8):
        attention_launches.run_narrow(library, option, "64x64", dtype)


def sm90(option: Callable, dims: str, library: ctypes.CDLL) -> None:
    """Both passes of Hopper's kernels."""
    attention_launches.Arrays = HostArrays  # type: ignore[misc]
    attention_launches.driver = lambda *_: None
    narrow = dims in ("64x64", "128x128")
    dtype = attention_launches.BF16 if narrow else attention_launches.F16
    attention_launches.run(library, "sm90", option, dims, dtype)


def cast(shape: tuple[int, int], library: ctypes.CDLL) -> None:
    """In both orders."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    made = cast_launches.launch(library, x, 8.0, "e4m3", Guarded())
    cast_launches.hold(made, x, 8.0, "e4m3")


def quantize(cases: list[quantize_launches.Case], library: ctypes.CDLL) -> None:
    """Whatever launches the call has."""
    rng = np.random.default_rng(1)
    drawn = quantize_launches.Drawn(cases, "bfloat16", rng)
    drawn.hold(quantize_launches.launch(library, drawn, Guarded()))


def norm_cast(shape: tuple[int, int], together: int, library: ctypes.CDLL) -> None:
    """With a residual; together: CTAs of its clusters."""
    drawn = norm_cast_launches.draw(np.random.default_rng(1), shape, "float32")
    made = norm_cast_launches.launch(library, drawn, 8.0, "e4m3", Guarded())
    norm_cast_launches.hold(made, drawn, 8.0, "e4m3")
    assert library.emulator_clustered_ctas() == together


def weigh(case: int, library: ctypes.CDLL) -> None:
    """Shares of tiles, by several tiles of keys."""
    drawn = select_launches.WEIGHS[case]
    rng = np.random.default_rng(1)
    given = select_launches.draw_weighed(rng, drawn, "bfloat16")
    made = select_launches.launch_weigh_tiles(library, given, Guarded())
    select_launches.hold_weighed(made, given)


def keep(tau: float, library: ctypes.CDLL) -> None:
    """Rows of several warps, and lists of them."""
    rows = select_launches.draw(np.random.default_rng(1), (3, 1000))
    made = select_launches.launch_keep_tiles(library, rows, tau, Guarded())
    select_launches.hold_keep(made, rows, tau)
    lists = select_launches.launch_list_tiles(library, made[0], 700, Guarded())
    select_launches.hold_lists(lists, made[0], 700)


def latent(case: Case, cta_bytes: int, library: ctypes.CDLL) -> None:
    library.emulator_set_hopper(False)
    library.emulator_set_cta_bytes(cta_bytes)
    run_on_host(library, Problem(case), times=1)


def hopper_latent(case: Case, library: ctypes.CDLL) -> None:
    library.emulator_set_hopper(True)
    library.emulator_set_cta_bytes(227 << 10)
    run_on_host(library, Problem(case), times=1)
    assert library.emulator_hopper_ctas() > 0


def paged(
    case: Case, library: ctypes.CDLL, hopper: str = "", short: bool = False
) -> None:
    library.emulator_set_short(short)
    library.emulator_set_hopper(bool(hopper))
    library.emulator_set_block_maps(hopper == "boxes")
    run_on_host(library, Problem(case), times=1)


GROUP = {"heads": 2, "kv_heads": 1}
HOLES = tuple((0, page, -1) for page in (0, 3, 4, 11, 24, 60, 61, 90))
FEW = {
    "few": Case(sequences=((1, 9), (1, 300), (1, 37), (1, 700))),
    "few, in 8 bits": Case(
        sequences=((1, 9), (1, 300), (1, 37)), cache="e4m3", scales="tokens"
    ),
    "few, in 8 bits, 64 rows": Case(
        sequences=((9, 60), (9, 300)), heads=8, cache="e4m3", scales="tokens"
    ),
    "few, 64 rows": Case(sequences=((9, 60), (9, 300)), heads=8, bad_ids=((1, 2, -1),)),
}
SHORT = {
    "short": Case(
        sequences=((1, 9), (1, 700), (1, 37)), bad_ids=((1, 2, -1),), **GROUP
    ),
    "short, drafts": Case(
        sequences=((2, 130), (0, 5), (1, 300)), block_size=3, **GROUP
    ),
    # The third row is not the third sequence's, whose blocks are asked for first.
    "short, another's blocks": Case(
        sequences=((2, 130), (1, 300), (1, 40), (0, 5)), block_size=3, **GROUP
    ),
}
MANY = {
    "many steps, holes": Case(sequences=((100, 1700), (80, 90)), bad_ids=HOLES),
    "many items": Case(sequences=((65, 40),) * 9 + ((65, 0),) * 4, **GROUP),
    "8 bits": Case(
        sequences=((100, 1300), (80, 90)),
        bad_ids=HOLES[:6],
        cache="e4m3",
        scales="heads",
        narrow=True,
    ),
    "8 bits, many items": Case(
        sequences=((65, 40),) * 9 + ((65, 0),) * 4, cache="e4m3", narrow=True, **GROUP
    ),
    "a window": Case(sequences=((150, 400), (100, 100)), window=(70, 0), **GROUP),
    "one place for Q": Case(
        sequences=((70, 300), (70, 100)),
        padded=70,
        full=True,
        calls=2,
        dtype="float16",
        head_dim=256,
        value_dim=256,
        bad_ids=HOLES[:4],
        **GROUP,
    ),
}
WIDE = {"latent": True, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
LATENT = {
    "16 rows": Case(sequences=((1, 9), (1, 300)), heads=16, **WIDE),
    "32 rows": Case(sequences=((1, 9), (1, 200)), heads=20, **WIDE),
    "64 rows": Case(sequences=((2, 200), (1, 70)), heads=40, **WIDE),
}
LATENT_HOPPER = {
    "even and odd": Case(
        sequences=((1, 250), (1, 128), (1, 9), (1, 70), (1, 330)), heads=20, **WIDE
    ),
    "many pieces": Case(sequences=((1, 40),) * 14, heads=24, **WIDE),
    "holes, a window": Case(
        sequences=((4, 400), (1, 200)),
        heads=20,
        block_size=8,
        window=(130, 0),
        bad_ids=((0, 40, -1), (0, 49, -1), (1, 20, -1)),
        **WIDE,
    ),
    "a split": Case(
        sequences=((1, 600), (1, 70)), heads=64, split_size=256, large=40.0, **WIDE
    ),
    "pairs": Case(sequences=((1, 250), (1, 9), (2, 70), (1, 330)), heads=72, **WIDE),
    "pairs, holes, a window": Case(
        sequences=((2, 400), (1, 200)),
        heads=128,
        block_size=8,
        window=(130, 0),
        bad_ids=((0, 40, -1), (0, 49, -1), (1, 20, -1)),
        **WIDE,
    ),
}
QUANTIZED = ("default", "lengths", "several dims", "80, head", "112, tensor")
SM90 = (
    *(attention_launches.plain, attention_launches.causal, attention_launches.lengths),
    *(attention_launches.packed, attention_launches.segments),
    *(attention_launches.softcap, attention_launches.bias),
    *(attention_launches.tiles, attention_launches.partial),
    *(attention_launches.long_q, attention_launches.long_kv),
    *attention_launches.DROPPED,
)
DENSE = ("few", "lengths", "bias", "partial", "dropped", "dropped_lengths")
CASES: dict[str, Callable[[ctypes.CDLL], None]] = {
    **{
        f"dense, {name}": functools.partial(dense, getattr(attention_launches, name))
        for name in DENSE
    },
    **{
        f"float32, {name}, {dims}": functools.partial(
            float32, getattr(attention_launches, name), dims
        )
        for name in DENSE[1:]
        for dims in ("64x64", "128x128")
    },
    **{
        f"fp8, {name}": functools.partial(narrow, getattr(attention_launches, name))
        for name in ("plain", "causal", "lengths", "segments", "long_q", "long_kv")
    },
    **{
        f"sm90, {option.__name__}, {dims}": functools.partial(sm90, option, dims)
        for option in SM90
        for dims in ("64x64", "128x128", "192x128", "192x192", "256x256")
    },
    **{
        f"quantize, {name}": functools.partial(quantize, quantize_launches.CASES[name])
        for name in QUANTIZED
    },
    **{f"select, weigh {i}": functools.partial(weigh, i) for i in (1, 3, 5)},
    **{f"select, keep {tau}": functools.partial(keep, tau) for tau in (0.0, 0.5)},
    "cast, two tiles": functools.partial(cast, (16, 272)),
    "norm_cast, a CTA alone": functools.partial(norm_cast, (16, 48), 0),
    "norm_cast, three CTAs": functools.partial(norm_cast, (48, 1040), 6),
    **{f"paged, {name}": functools.partial(paged, case) for name, case in FEW.items()},
    **{
        f"paged, {name}": functools.partial(paged, case, short=True)
        for name, case in SHORT.items()
    },
    **{
        f"latent, {name}, {kib} KiB": functools.partial(latent, case, kib << 10)
        for name, case in LATENT.items()
        for kib in (227, 163)
    },
    **{
        f"latent, Hopper, {name}": functools.partial(hopper_latent, case)
        for name, case in LATENT_HOPPER.items()
    },
    **{
        f"Hopper, {name}, {by}": functools.partial(paged, case, hopper=by)
        for name, case in MANY.items()
        for by in ("boxes", "rows")
    },
}


def named(library: Path, report: str) -> Iterator[str]:
    """The lines of a report, with functions and lines in place of addresses."""

    @functools.cache
    def place(address: str) -> str:
        command = ["addr2line", "-Cfisp", "-e", str(library), address]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        places = []
        for inlined in said.stdout.splitlines():
            function, at = inlined.removeprefix(" (inlined by) ").rsplit(" at ", 1)
            while function != (
                function := re.sub(r"<[^<>]*>|\([^()]*\)", "", function)
            ):
                pass
            function = function.removesuffix(" const").split(" ")[-1]
            places.append(f"{'::'.join(function.split('::')[-2:])} {at.split(' ')[0]}")
        return " < ".join(places[:5])

    for line in report.splitlines():
        yield re.sub(r"\[(0x\w+)\]", lambda found: f"[{place(found[1])}]", line)


def main(path: str, begins: str) -> None:
    library = ctypes.CDLL(path)
    library.emulator_races.restype = ctypes.c_char_p
    if hasattr(library, "emulator_set_multiprocessors"):
        library.emulator_set_multiprocessors(2)
    names = [name for name in CASES if name.startswith(begins)]
    for name in names:
        try:
            CASES[name](library)
        except AssertionError as wrong:
            print(f"{name}: wrong: {wrong}")
        for line in named(Path(path), library.emulator_races().decode()):
            print(f"{name}: {line}", flush=True)
    print(len(names), "cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
