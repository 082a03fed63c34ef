"""The list of mutants fits the sources, and who runs it knows a survivor."""

from __future__ import annotations

import re
from pathlib import Path

import mutants
import pytest
from gpu_mutants import GPU
from mutant_list import ROOT, Mutant
from mutants import CPU, Outcome
from sweep_cases import draw_cases

ALL = [pytest.param(m, id=m.name) for m in (*CPU, *GPU)]


@pytest.mark.parametrize("mutant", ALL)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    built = (ROOT / "CMakeLists.txt").read_text()
    for made in mutant.objects:
        if made.endswith(".cu"):
            assert made in built
            continue
        pass_of, dims = made.removesuffix("_").rsplit("_", 1)
        assert (ROOT / f"cpp/ops/attention/{pass_of}/instance.cu.in").exists()
        assert re.search(rf"kvblock_add_instances\([^)]* {dims}[ )]", built)


def test_what_kills_is_there() -> None:
    for mutant in CPU:
        file, names = mutant.killer
        known = (ROOT / file).read_text()
        assert all(name in known for name in re.findall(r"test_\w+", names)), mutant
    for mutant in GPU:
        only = mutant.killer[mutant.killer.index("--only") + 1]
        assert any(only in str(case) for case in draw_cases(5, 2)), mutant


def test_a_survivor_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    noticed, survives = Outcome(CPU[0], True, "test_x"), Outcome(CPU[1], False, "0")
    assert mutants.report([noticed]) == 0
    assert mutants.report([noticed, survives]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 mutants were noticed" in said
    assert f"SURVIVES {CPU[1].name}" in said


def test_a_change_of_the_line_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant("a", "x.py", "one", "two", ("tests/x.py",))
    (tmp_path / "x.py").write_text("one, one")
    with pytest.raises(AssertionError, match=r"a: x\.py has changed"):
        mutant.apply(tmp_path)
    (tmp_path / "x.py").write_text("one")
    mutant.apply(tmp_path)
    assert (tmp_path / "x.py").read_text() == "two"
