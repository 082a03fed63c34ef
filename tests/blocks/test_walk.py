"""In which side's order a copy walks on CUDA: the choice is by numbers alone."""

from __future__ import annotations

import pytest
from cases import HEAD_DIM_64, LLAMA_8B_16, SHORT_RUNS, Case

from jax_kvblock.blocks.plan import Copy, Form, Side, cuda_leader

FORMS = {
    "NHD pool": "| B L O T H D",
    "layered NHD pool": "L | B O T H D",
    "HND pool": "| B L O H T D",
    "NHD": "| N L O T H D",
    "HND": "| N L O H T D",
    "universal": "| N H L O T D",
}
DEVICE = (False, False)


def make_copy(case: Case, src: str, dst: str) -> Copy:
    block = tuple(zip("LOTHD", case.dims, strict=True))
    extents = (("N", 6), *block)

    def side(name: str) -> Side:
        if "pool" in name:
            return Side(Form.parse(FORMS[name]), (("B", 10), *block), index=("B",))
        return Side(Form.parse(FORMS[name]), extents)

    return Copy(extents, side(src), side(dst), in_place="pool" in dst)


@pytest.mark.parametrize("src", ["NHD", "NHD pool", "layered NHD pool"])
def test_the_source_leads_where_the_destination_cuts_it_short(src: str) -> None:
    copy = make_copy(HEAD_DIM_64, src, "universal")  # 128 of every 1024 bytes
    assert cuda_leader(copy, 2, DEVICE) is copy.src


@pytest.mark.parametrize(
    ("case", "src", "dst"),
    [
        (HEAD_DIM_64, "universal", "NHD pool"),  # whose own walk is the better one
        (HEAD_DIM_64, "HND pool", "universal"),  # runs of 2 KiB
        (LLAMA_8B_16, "layered NHD pool", "universal"),  # runs of 256 bytes
        (SHORT_RUNS, "NHD pool", "universal"),  # 10 bytes: through tiles
    ],
)
def test_else_the_destination_leads(case: Case, src: str, dst: str) -> None:
    copy = make_copy(case, src, dst)
    assert cuda_leader(copy, 2, DEVICE) is copy.dst


@pytest.mark.parametrize("case", [HEAD_DIM_64, LLAMA_8B_16])
def test_the_side_in_host_memory_leads(case: Case) -> None:
    for src, dst in (("NHD pool", "universal"), ("universal", "NHD pool")):
        copy = make_copy(case, src, dst)
        assert cuda_leader(copy, 2, (True, False)) is copy.src
        assert cuda_leader(copy, 2, (False, True)) is copy.dst
