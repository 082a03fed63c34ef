#include "objects/step.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

namespace kvblock {
namespace {

// Does something for each table; what one refuses names it.
template <typename Do>
void ForEach(const std::string& where, const std::vector<Table*>& tables, Do&& what) {
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto named = [&](const std::exception& refused) {
      return where + ": tables[" + std::to_string(i) + "]: " + refused.what();
    };
    try {
      what(i, *tables[i]);
    } catch (const std::out_of_range& refused) {
      throw std::out_of_range(named(refused));
    } catch (const std::invalid_argument& refused) {
      throw std::invalid_argument(named(refused));
    }
  }
}

void CheckTogether(const std::string& where, const std::vector<Table*>& tables) {
  std::vector<Table*> sorted(tables);
  std::sort(sorted.begin(), sorted.end(), std::less<>());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    const auto at = std::find(tables.begin(), tables.end(), *twice) - tables.begin();
    throw std::invalid_argument(where + ": tables[" + std::to_string(at) + "] is there twice");
  }
  ForEach(where, tables, [&](size_t, Table& table) {
    table.blocks();  // refuses one that was freed
    if (&table.books() != &tables.front()->books())
      throw std::invalid_argument("it is of another manager than tables[0]");
  });
}

}  // namespace

std::optional<Step> PrepareStep(const std::vector<Table*>& tables, const int64_t* starts,
                                const int64_t* counts, int64_t width, int64_t spare) {
  CheckTogether("prepare_step", tables);
  Step step;
  step.query_start.assign(tables.size() + 1, 0);
  step.kv_lens.reserve(tables.size());
  int64_t total = 0, tokens = 0;
  ForEach("prepare_step", tables, [&](size_t i, Table& table) {
    const int64_t start = starts != nullptr ? starts[i] : table.num_tokens() - counts[i];
    const int64_t missing = table.CheckStep(start, counts[i], width);
    table.MakeRoom(missing);
    total += missing;
    tokens += counts[i];
    step.kv_lens.push_back(static_cast<int32_t>(start + counts[i]));
    step.query_start[i + 1] = static_cast<int32_t>(tokens);
  });
  if (tables.empty()) return step;
  step.slots.resize(static_cast<size_t>(tokens));
  step.block_tables.resize(tables.size() * static_cast<size_t>(width));
  Books& books = tables.front()->books();
  if (total > 0 && spare > books.num_available() - total) {
    ++books.counters.refused;
    return std::nullopt;
  }
  Hold fresh(tables.front()->shared_books());
  if (!fresh.Take(total)) return std::nullopt;
  // Nothing fails from here on.
  const int64_t* next = fresh.blocks().data();
  int32_t* slots = step.slots.data();
  for (size_t i = 0; i < tables.size(); ++i) {
    next = tables[i]->Adopt(next, step.kv_lens[i]);
    tables[i]->WriteSlots(step.kv_lens[i] - counts[i], counts[i], slots);
    tables[i]->WritePageTable(width, step.block_tables.data() + i * static_cast<size_t>(width));
    slots += counts[i];
  }
  fresh.blocks().clear();  // the tables have the references
  return step;
}

void AppendEach(const std::vector<Table*>& tables, const int32_t* tokens, const int64_t* counts) {
  CheckTogether("append_tokens", tables);
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i]->Append(tokens, counts[i]);
    tokens += counts[i];
  }
}

std::vector<int64_t> CommitEach(const std::vector<Table*>& tables, const int64_t* num_tokens) {
  CheckTogether("commit_tokens", tables);
  const auto written = [&](size_t i) {
    return num_tokens != nullptr ? num_tokens[i] : tables[i]->num_tokens();
  };
  ForEach("commit_tokens", tables, [&](size_t i, Table& table) { table.CheckCommit(written(i)); });
  std::vector<int64_t> changed;
  changed.reserve(tables.size());
  for (size_t i = 0; i < tables.size(); ++i)
    if (!tables[i]->Commit(written(i)).empty()) changed.push_back(static_cast<int64_t>(i));
  return changed;
}

}  // namespace kvblock
