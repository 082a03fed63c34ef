"""The rooms of the C++ sources: who may include whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CPP = Path(__file__).parents[2] / "cpp"
ATTENTION = "ops/attention/"
SHARED = ("kvblock/", "device/", "host/")

# A room, and the rooms that its files may include besides their own. A file belongs to
# the longest name that its path begins with. The sources of kvblock/ are in include/.
CONTRACT = (*SHARED, f"{ATTENTION}contract/")
MASK = (*CONTRACT, f"{ATTENTION}mask/")
KERNELS = (*MASK, f"{ATTENTION}schedule/")
HOPPER = f"{ATTENTION}hopper/"
ALLOWED: dict[str, tuple[str, ...]] = {
    "kvblock/": (),
    "device/": (),
    "dlpack/": (),
    "objects/": (),
    "host/": ("kvblock/",),
    "ops/after/": SHARED,
    "ops/append/": SHARED,
    "ops/block_copy/": SHARED,
    "ops/cast/": SHARED,
    "ops/copy_stream/": SHARED,
    "ops/kernel_call/": SHARED,
    "ops/quantize/": SHARED,
    # Scores of pieces are the first product of attention.
    "ops/select/": (*SHARED, f"{ATTENTION}contract/", f"{ATTENTION}generic/"),
    f"{ATTENTION}contract/": SHARED,
    f"{ATTENTION}mask/": CONTRACT,
    f"{ATTENTION}schedule/": MASK,
    f"{ATTENTION}combine/": KERNELS,
    f"{ATTENTION}generic/": KERNELS,
    f"{ATTENTION}generic/forward/": (*KERNELS, f"{ATTENTION}generic/"),
    f"{ATTENTION}generic/backward/": (*KERNELS, f"{ATTENTION}generic/"),
    f"{ATTENTION}generic/split/": (
        *KERNELS,
        f"{ATTENTION}generic/",
        f"{ATTENTION}generic/forward/",
        f"{ATTENTION}combine/",
    ),
    f"{ATTENTION}generic/paged/": (
        *KERNELS,
        f"{ATTENTION}generic/",
        f"{ATTENTION}generic/forward/",
        f"{ATTENTION}generic/split/",
        f"{ATTENTION}combine/",
    ),
    f"{ATTENTION}generic/latent/": (
        *KERNELS,
        f"{ATTENTION}generic/",
        f"{ATTENTION}generic/split/",
        f"{ATTENTION}generic/paged/",
        f"{ATTENTION}combine/",
    ),
    HOPPER: KERNELS,
    f"{HOPPER}forward/": (*KERNELS, HOPPER),
    f"{HOPPER}backward/": (*KERNELS, HOPPER),
    f"{HOPPER}paged/": (*KERNELS, HOPPER, f"{HOPPER}forward/"),
    f"{HOPPER}latent/": (
        *KERNELS,
        HOPPER,
        f"{HOPPER}forward/",
        f"{ATTENTION}combine/",
    ),
    # Only stands in for the launchers, and the entries choose between all of them.
    f"{HOPPER}not_built.cu": tuple(
        f"{HOPPER}{part}/" for part in ("forward", "backward", "paged", "latent")
    ),
    ATTENTION: (
        *SHARED,
        *(
            f"{ATTENTION}{kernels}/{half}/"
            for kernels in ("generic", "hopper")
            for half in ("forward", "backward")
        ),
        f"{ATTENTION}generic/split/",
        f"{ATTENTION}generic/paged/",
        f"{ATTENTION}generic/latent/",
        f"{HOPPER}paged/",
        f"{HOPPER}latent/",
    ),
    "module.cc": (
        *("kvblock/", "dlpack/", "objects/"),
        *("ops/after/", "ops/append/", "ops/block_copy/", "ops/cast/"),
        *("ops/kernel_call/", "ops/quantize/", "ops/select/", ATTENTION),
    ),
}
# Of a subject that other rooms know nothing of; host/ has checks of both.
STRANGE = {
    "host/append_check": "attention",
    "host/attention_check": "block_copy",
    "host/block_copy_check": "attention",
    ATTENTION: "block_copy",
    "kvblock/attention.h": "block_copy",
    "kvblock/block_copy.h": "attention",
}
SUFFIXES = (".h", ".cuh", ".cu", ".cc", ".in")


def room_of(file: str) -> str:
    rooms = [room for room in ALLOWED if file.startswith(room)]
    return max(rooms, key=len, default="")


def wrong_includes(file: str, text: str) -> list[str]:
    """What of a file's includes runs against the order of rooms."""
    room = room_of(file)
    if not room:
        return [f"{file} is in no room"]
    wrong = []
    for include in re.findall(r'#include "([^"]+)"', text):
        of = room_of(include)
        foreign = not of or of not in (room, *ALLOWED[room])
        strange = any(
            file.startswith(part) and subject in include
            for part, subject in STRANGE.items()
        )
        if (foreign or strange) and not include.startswith("xla/"):
            wrong.append(f"{file} includes {include}")
    return wrong


FILES = sorted(
    str(path.relative_to(CPP)).removeprefix("include/")
    for path in CPP.rglob("*")
    if path.suffix in SUFFIXES
)


def test_no_include_runs_against_the_order_of_rooms() -> None:
    wrong = []
    for file in FILES:
        folder = CPP / "include" if file.startswith("kvblock/") else CPP
        wrong += wrong_includes(file, (folder / file).read_text())
    assert len(FILES) > 60 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("ops/attention/mask/sequence.cuh", "ops/attention/hopper/clusters.h"),
        ("ops/attention/contract/params.cuh", "ops/attention/mask/sequence.cuh"),
        ("ops/attention/hopper/backward/worker.cuh", "ops/attention/generic/tile.cuh"),
        ("ops/attention/hopper/backward/loader.cuh",
         "ops/attention/hopper/forward/loader.cuh"),
        ("ops/attention/schedule/grid.h", "host/block_copy_check.h"),
        ("kvblock/attention.h", "kvblock/block_copy.h"),
        ("device/mma.cuh", "ops/attention/contract/params.cuh"),
        ("host/attention_check.cc", "host/block_copy_check.h"),
        ("host/append_check.cc", "kvblock/attention.h"),
        ("ops/append/append_cuda.cu", "ops/attention/contract/params.cuh"),
        ("ops/new_room/file.h", "device/mma.cuh"),
    ],
)  # fmt: skip
def test_an_include_against_the_order_is_found(file: str, include: str) -> None:
    assert wrong_includes(file, f'#include <string>\n#include "{include}"\n')
