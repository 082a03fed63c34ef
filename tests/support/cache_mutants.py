"""The small mistakes of mutants.py in the books of pools, and what notices each."""

from __future__ import annotations

from mutant_list import Mutant, test

BOOKS, INDEX = "cpp/objects/books.cc", "cpp/objects/key_index.h"
TABLE, HASH = "cpp/objects/table.cc", "cpp/objects/blake3.cc"
RANDOM = test("test_random", "test_random_operations")
STEP = "cpp/objects/step.cc"
STEPS = test("test_steps")
HASHES = test("test_keys", "test_the_hash")
GDS = test("test_disk_gds")
BELOW, TIER = "jax_kvblock/cache/below.py", "jax_kvblock/cache/disk/tier.py"
CHECKER = "tests/native/test_books_check.py", "test_each_damage"
CACHE = (
    Mutant(
        "what comes straight from disk is not held to its checksums",
        TIER,
        "hits[i] = place.matches(row)",
        "hits[i] = True",
        GDS,
    ),
    Mutant(
        "a read to the device that fails leaves others under way",
        "jax_kvblock/cache/disk/gds.py",
        "            except Exception as error:\n                errors.append(error)",
        "            except Exception:\n                raise",
        GDS,
    ),
    Mutant(
        "kvikio is asked again though it failed",
        "jax_kvblock/cache/disk/gds.py",
        "if not self._wanted:",
        "if False:",
        GDS,
    ),
    Mutant(
        "blocks from disk lie at the beginning of the room",
        BELOW,
        "self._copies.places(room, missing, self.host.block_bytes)",
        "self._copies.places(room, [*range(len(missing))], self.host.block_bytes)",
        GDS,
    ),
    Mutant(
        "other rows of the room are held to the checksums",
        BELOW,
        "rows = [missing[i] for i in places]",
        "rows = [*places]",
        GDS,
    ),
    Mutant(
        "what was read to the host instead is not copied up",
        BELOW,
        "in_room = found is not None",
        "in_room = True",
        GDS,
    ),
    Mutant(
        "blocks of the host go to other places of the room",
        "jax_kvblock/cache/copies.py",
        "at = np.arange(len(slots)) if at is None else at",
        "at = np.arange(len(slots))",
        GDS,
    ),
    Mutant(
        "the checker says nothing of blocks",
        BOOKS,
        'wrong.push_back("block " + std::to_string(block) + " " + what);',
        "",
        CHECKER,
    ),
    Mutant(
        "parents are evicted before their children",
        BOOKS,
        "for (size_t i = blocks.size(); i-- > 0;)",
        "for (size_t i = 0; i < blocks.size(); ++i)",
        RANDOM,
    ),
    Mutant(
        "who is idle stays so when it is held again",
        BOOKS,
        "if (IsIdle(block)) Unshelve(block);",
        "",
        RANDOM,
    ),
    Mutant(
        "who was idle last goes first",
        BOOKS,
        "if (behind_[end] != end) return behind_[end];",
        "if (behind_[end] != end) return before_[end];",
        RANDOM,
    ),
    Mutant(
        "what was used long ago counts as much as ever",
        BOOKS,
        "++present_age_;",
        "",
        RANDOM,
    ),
    Mutant(
        "lists do not change places when uses are halved",
        BOOKS,
        "++end) Join(end, end - 1);",
        "++end) {}",
        RANDOM,
    ),
    Mutant(
        "the key of an evicted block goes on finding it",
        BOOKS,
        "  Forget(block);\n  ++counters.evicted;",
        "  Unshelve(block);\n  free_.push_back(block);\n  ++counters.evicted;",
        RANDOM,
    ),
    Mutant(
        "two blocks have one key",
        BOOKS,
        "  if (there != kNone) {\n",
        "  if (there == block) {\n",
        RANDOM,
    ),
    Mutant(
        "a block is free while somebody holds it",
        BOOKS,
        "if (--references_[block] > 0) return;",
        "if (--references_[block] > 1) return;",
        RANDOM,
    ),
    Mutant(
        "matches do not count",
        BOOKS,
        "if (uses_[block] < UINT32_MAX) ++uses_[block];",
        "",
        RANDOM,
    ),
    Mutant(
        "a block inherits the uses of what was in its place",
        BOOKS,
        "  uses_[block] = 1;\n",
        "",
        RANDOM,
    ),
    Mutant(
        "what is removed is told to nobody",
        BOOKS,
        "if (keeps_events) events.push_back({Event::kRemoved",
        "if (false) events.push_back({Event::kRemoved",
        RANDOM,
    ),
    Mutant(
        "another policy forgets who was more valuable",
        BOOKS,
        "    Join(end, num_blocks());\n",
        "    {}\n",
        RANDOM,
    ),
    Mutant(
        "who stands behind a key that goes is lost",
        INDEX,
        "if (((at - home) & mask_) >= ((at - hole) & mask_)) {",
        "if (false) {",
        RANDOM,
    ),
    Mutant(
        "who stands behind a key that goes moves in front of its home",
        INDEX,
        "if (((at - home) & mask_) >= ((at - hole) & mask_)) {",
        "if (true) {",
        RANDOM,
    ),
    Mutant(
        "blocks are written that others see",
        TABLE,
        "if (books().IsShared(block)) {",
        "if (false) {",
        RANDOM,
    ),
    Mutant(
        "other tokens are committed into a published block",
        TABLE,
        "if (books().KeyOf(own) != keys_[static_cast<size_t>(i)]) {",
        "if (false) {",
        RANDOM,
    ),
    Mutant(
        "a window gives back the block that it ends in",
        TABLE,
        "std::min(token / size_, size())",
        "std::min(BlocksFor(token), size())",
        RANDOM,
    ),
    Mutant(
        "refused drafts stay in the keys",
        TABLE,
        "  keys_.resize(static_cast<size_t>(full));\n",
        "",
        RANDOM,
    ),
    Mutant(
        "a fork does not hold what it shares",
        TABLE,
        "if (block != Books::kNone) books().Hold(block, Holder::kTable);",
        "",
        RANDOM,
    ),
    Mutant(
        "the left side of a tree of chunks is all of it",
        HASH,
        "while (2 * left < size) left *= 2;",
        "while (2 * left <= size) left *= 2;",
        HASHES,
    ),
    Mutant(
        "chunks on the right count from 0",
        HASH,
        "number + left / kChunk",
        "number",
        HASHES,
    ),
    Mutant(
        "the last token's logits come from the cache",
        "jax_kvblock/cache/table.py",
        "limit = self.num_tokens - 1",
        "limit = self.num_tokens",
        test("test_prefix", "test_the_last_token"),
    ),
    Mutant(
        "a step's blocks are given back when it has handed them out",
        STEP,
        "  fresh.blocks().clear();",
        "",
        STEPS,
    ),
    Mutant(
        "a step's first table gets the others' blocks",
        STEP,
        "next = tables[i]->Adopt(",
        "tables[i]->Adopt(",
        STEPS,
    ),
    Mutant(
        "a step spares blocks where it takes none",
        STEP,
        "if (total > 0 && spare",
        "if (spare",
        STEPS,
    ),
    Mutant(
        "who is refused has published before",
        STEP,
        "{ table.CheckCommit(written(i)); }",
        "{ table.Commit(written(i)); }",
        STEPS,
    ),
    Mutant(
        "tables of two managers are in one step",
        STEP,
        "if (&table.books() != &tables.front()->books())",
        "if (false)",
        STEPS,
    ),
    Mutant(
        "a row of block tables shows what lay in memory",
        TABLE,
        "  std::fill(table, table + (width - size()), -1);",
        "",
        STEPS,
    ),
)
