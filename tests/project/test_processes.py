"""Scripts that run as several processes, which other tests use."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import hold_processes, run_processes

MUCH = """
import sys
import time
from pathlib import Path

rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
print("much " * 100_000, flush=True)  # more than a pipe holds
(folder / str(rank)).touch()
while len([*folder.iterdir()]) < count:
    time.sleep(0.01)
print(f"{rank} of {count}: 3 are right", flush=True)
sys.exit(rank)
"""


def written(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script


def test_those_who_say_much_wait_for_nobody(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    script = written(tmp_path, MUCH)
    ended = run_processes(script, 3, str(here), seconds=30)
    assert [code for code, _ in ended] == [0, 1, 2]
    assert all(said.count("much ") == 100_000 for _, said in ended)


def test_those_of_gpus_take_turns(tmp_path: Path) -> None:
    """A job of each of two threads, which are as good as two processes here."""
    (here := tmp_path / "here").mkdir()
    text = """
import sys
import time
from pathlib import Path

mine = Path(sys.argv[4]) / "running"
mine.touch(exist_ok=False)
time.sleep(0.3)
mine.unlink()
"""
    script = written(tmp_path, text)
    with ThreadPoolExecutor(3) as threads:
        jobs = [
            threads.submit(run_processes, script, 1, str(here), "gpu") for _ in range(3)
        ]
        assert [job.result() for job in jobs] == [[(0, "")]] * 3


def test_one_that_hangs_is_told_with_where_it_is(tmp_path: Path) -> None:
    text = "import sys, time\nprint('begun', flush=True)\ntime.sleep(60)\n"
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="after 1 s") as caught:
        run_processes(written(tmp_path, text), 2, seconds=1)
    assert str(caught.value).count("begun") == 2
    assert str(caught.value).count('script.py", line 3') == 2
    assert time.monotonic() - begun < 20


def test_the_last_words_are_held(tmp_path: Path) -> None:
    text = "import sys\nprint(sys.argv[1], 'of', sys.argv[2] + ': 3 are right')\n"
    script = written(tmp_path, text)
    hold_processes(script, 2, "3")
    with pytest.raises(AssertionError):
        hold_processes(script, 2, "4")
    with pytest.raises(AssertionError):
        hold_processes(written(tmp_path, text + "sys.exit(1)\n"), 2, "3")
