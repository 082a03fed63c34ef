"""`--cases N`, `--wide-cases N`, `--part N`: the same part of the suite in every run.

At most N cases of a test; the second of sweeps alone, what is marked `wide`; one test
function of N. `make test-all` and a GPU take all of them, CI a few. Cases are drawn by
their names, so that those of a grid differ in all of its parameters, and functions by
theirs. A second run takes other cases with `--cases-from K`. Where cases are things of
their own, such as documents, the marker `cases(n)` has a first run take n of them; and
a case that is marked `often` itself it takes besides. Cases that are skipped here, as
those of a GPU where there is none, come behind all others. What is left out counts as
deselected.
"""

from __future__ import annotations

import collections
import zlib

import pytest

OPTIONS = {
    "--cases": "at most N cases of each test function, drawn by their names",
    "--wide-cases": "the same, of those marked `wide` alone",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cases")
    for name, help_text in OPTIONS.items():
        group.addoption(name, type=int, metavar="N", help=help_text)
    help_text = "begin with another case, K places on, where a test has several"
    group.addoption("--cases-from", type=int, default=0, metavar="K", help=help_text)
    help_text = "one test function of N, drawn by their names"
    group.addoption("--part", type=int, default=1, metavar="N", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    for name in (*OPTIONS, "--part"):
        limit = config.getoption(name)
        if limit is not None and limit < 1:
            raise pytest.UsageError(f"{name} must be at least 1, got {limit}")


# After `-m` and `-k`: of what they leave.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    kept = set(items)
    for name in OPTIONS:
        if limit := config.getoption(name):
            wide = name == "--wide-cases"
            some = [
                each for each in items if not wide or each.get_closest_marker("wide")
            ]
            kept -= set(some) - drawn(some, limit, config.getoption("--cases-from"))
    if (parts := config.getoption("--part")) > 1:
        kept = {item for item in kept if not _number(item) % parts}
    if len(kept) < len(items):
        left_out = [item for item in items if item not in kept]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _number(item: pytest.Item) -> int:
    """Of a test function, the same for all of its cases."""
    return zlib.crc32(item.nodeid.partition("[")[0].encode())


def drawn(items: list[pytest.Item], limit: int, first: int = 0) -> set[pytest.Item]:
    """Of each test function at most so many, from one on; the first follow the last."""
    cases = collections.defaultdict[object, list[pytest.Item]](list)
    for item in sorted(items, key=lambda item: zlib.crc32(item.name.encode())):
        # A class may inherit a test: it is another one there.
        cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    found = set()
    for of_one in cases.values():
        running = [item for item in of_one if not item.get_closest_marker("skip")]
        skipped = [item for item in of_one if item.get_closest_marker("skip")]
        begin = first % max(len(running), 1)
        marked = of_one[0].get_closest_marker("cases")
        count = max(limit, marked.args[0] if marked and not first else 0)
        found.update((running[begin:] + running[:begin] + skipped)[:count])
        if not first:
            found.update(item for item in of_one if item.get_closest_marker("often"))
    return found
