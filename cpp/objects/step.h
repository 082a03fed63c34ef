// Several tables in one step of an engine: what each table does alone, in one call for all.
//
// The tables are of one pool, and none is there twice. What is refused is an exception that names
// the table, and then nothing has changed.
#ifndef KVBLOCK_OBJECTS_STEP_H_
#define KVBLOCK_OBJECTS_STEP_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "objects/table.h"

namespace kvblock {

// What a program is given. The tokens lie one table's after the other's.
struct Step {
  std::vector<int32_t> slots;         // a token
  std::vector<int32_t> block_tables;  // a table: `width` blocks, -1 behind the last one
  std::vector<int32_t> kv_lens;       // a table
  std::vector<int32_t> query_start;   // a table, and how many tokens there are
};

// Blocks for the tokens start, start + 1, … of each table, and where they lie. Without starts,
// those that were appended last. All or none: nothing where there are too few blocks, `spare` left
// to others.
std::optional<Step> PrepareStep(const std::vector<Table*>& tables, const int64_t* starts,
                                const int64_t* counts, int64_t width, int64_t spare);

// So many tokens behind each table's others; those of each lie behind those of the one before.
void AppendEach(const std::vector<Table*>& tables, const int32_t* tokens, const int64_t* counts);

// Publishes what so many tokens of each table fill; without numbers, all that were appended.
// Returns which tables have another block now.
std::vector<int64_t> CommitEach(const std::vector<Table*>& tables, const int64_t* num_tokens);

}  // namespace kvblock

#endif  // KVBLOCK_OBJECTS_STEP_H_
