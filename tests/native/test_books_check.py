"""The books' checker says what is wrong with books that are damaged, each in one way.

Property tests rely on it to find what is lost, leaked or free twice.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from cpp_programs import ROOT, built_once, compiler
from small_tiers import Setup

# Of eight blocks 0 and 1 are idle, 2 is held by a handle and published, 3 by a table.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "objects/blake3.h"
#include "objects/key_index.h"
#define private public
#include "objects/books.h"
#undef private

using namespace kvblock;

int main(int, char** given) {
  const std::string damage = given[1];
  Books books(8);
  int64_t ids[4];
  books.Take(3, Holder::kHandle, ids);
  One* const one = new One(books, ids[0]);
  One* const two = new One(books, ids[1]);
  new One(books, ids[2]);
  Several& table = *new Several(books);
  table.blocks.resize(1);
  books.Take(1, Holder::kTable, table.blocks.data());
  Digest keys[3] = {}, parent = {};
  for (int i = 0; i < 3; ++i) {
    std::memset(&keys[i], i + 1, sizeof(keys[i]));
    books.Publish(ids[i], keys[i], parent, {});
  }
  delete one, delete two;  // their blocks are idle
  const int idle = ids[0], held = ids[2], of_table = table.blocks[0];
  std::printf("%d %d %d\\n", idle, held, of_table);
  if (damage == "references") ++books.references_[held];
  if (damage == "lost reference") --books.references_[of_table];
  if (damage == "handles") ++books.counts_[0][held];
  if (damage == "exports") ++books.counts_[1][held];
  if (damage == "tables") --books.counts_[2][of_table];
  if (damage == "export") books.live[1] = Exported{held, {}};
  if (damage == "free twice") books.free_.push_back(books.free_.front());
  if (damage == "free and held") books.free_.push_back(held);
  if (damage == "leaked") books.free_.pop_back();
  if (damage == "idle is lost") books.Unshelve(idle), ++books.num_idle_;
  if (damage == "held is idle") books.Shelve(held);
  if (damage == "link") books.before_[books.behind_[idle]] = held;
  if (damage == "idle count") ++books.num_idle_;
  if (damage == "key") books.keys_[held] = keys[0];
  if (damage == "unpublished") books.published_[held] = 0;
  for (const std::string& wrong : books.Check()) std::printf("%s\\n", wrong.c_str());
  std::fflush(stdout);
  std::_Exit(0);  // nobody gives blocks back to books that are wrong
}
"""


@pytest.fixture(scope="session")
def checker(tmp_path_factory) -> Path:
    def build(program: Path) -> None:
        source = program.with_suffix(".cc")
        source.write_text(PROGRAM)
        command = [compiler(), "-std=c++17", "-O1", f"-I{ROOT}", str(source)]
        command += [
            str(ROOT / "objects" / f"{name}.cc") for name in ("books", "blake3")
        ]
        subprocess.run([*command, "-o", str(program)], check=True)

    return built_once(tmp_path_factory, "books_check", build)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("nothing", []),
        ("references", ["held has a wrong number of references"]),
        (
            "lost reference",
            ["table has a wrong number of references", "table is 0 times"],
        ),
        ("handles", ["held has 1 handles, and 2 are noted"]),
        ("exports", ["held has 0 exports, and 1 are noted"]),
        ("tables", ["table has 1 tables, and 0 are noted"]),
        ("export", ["held has 1 exports, and 0 are noted", "held has a wrong number"]),
        ("free twice", [r"\d is 2 times among the free ones"]),
        ("free and held", ["held is 1 times among the free ones"]),
        ("leaked", [r"\d is 0 times among the free ones"]),
        ("idle is lost", ["idle is 0 times among the idle", "number of idle blocks"]),
        ("held is idle", ["held is 1 times among the idle"]),
        ("link", ["is not in front of who is behind it"]),
        ("idle count", ["the number of idle blocks is wrong"]),
        ("key", ["held is not found by its key"]),
        ("unpublished", ["keys are left of blocks that are not published"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_damage_is_told(checker: Path, damage: str, said: list[str]) -> None:
    ran = subprocess.run(
        [str(checker), damage], capture_output=True, text=True, check=True
    )
    first, *lines = ran.stdout.splitlines()
    for name, number in zip(("idle", "held", "table"), first.split(), strict=True):
        lines = [line.replace(f"block {number} ", f"block {name} ") for line in lines]
    assert len(lines) == len(said), lines
    for line, wanted in zip(lines, said, strict=True):
        assert re.search(wanted, line), (line, wanted)


def test_caches_raise_what_is_told(monkeypatch) -> None:
    one = Setup()
    one.tiers.check()
    wrong = SimpleNamespace(check=lambda: ["block 3 is lost", "block 4 is"])
    with monkeypatch.context() as patch:
        patch.setattr(one.tiers.below.host, "books", wrong)
        with pytest.raises(RuntimeError, match="host: block 3 is lost; block 4 is"):
            one.tiers.check()
    with monkeypatch.context() as patch:
        patch.setattr(type(one.cache), "_free_list", wrong)
        for check in one.cache.check, one.tiers.check:
            with pytest.raises(RuntimeError, match="block 3 is lost; block 4 is"):
                check()
    one.tiers.close()
