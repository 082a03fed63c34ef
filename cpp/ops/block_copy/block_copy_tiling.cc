#include "ops/block_copy/block_copy_tiling.h"

#include <algorithm>

#include "host/block_copy_check.h"

namespace kvblock {
namespace {

constexpr int64_t kSegment = 128;  // bytes that each side of a tile should hold in a row

}  // namespace

bool Tiling::Has(int k) const { return std::find(box.begin(), box.end(), k) != box.end(); }

// A box takes no dim along which ids are looked up or buffers change.
bool Tiling::MayTake(int k) const {
  const bool ids = copy.src.ids != nullptr || copy.dst.ids != nullptr;
  return !(k == 0 && ids) && copy.src.table_strides[k] == 0 && copy.dst.table_strides[k] == 0 &&
         copy.src.strides[k] > 0 && copy.dst.strides[k] > 0;
}

// Takes dim k, or its inner part when all of it is too much. Says by how much the box grew.
int64_t Tiling::Take(int k, int64_t limit) {
  int64_t factor = std::min(copy.dims[k], limit / bytes);
  while (factor > 1 && copy.dims[k] % factor != 0) --factor;
  if (factor <= 1) return 1;
  if (factor < copy.dims[k]) {
    if (copy.rank == KVBLOCK_MAX_RANK) return 1;
    Split(k, factor);
    ++k;
  }
  box.push_back(k);
  bytes *= factor;
  return factor;
}

// Makes dim k two dims, (dims[k] / factor, factor).
void Tiling::Split(int k, int64_t factor) {
  for (int j = static_cast<int>(copy.rank); j > k; --j) {
    copy.dims[j] = copy.dims[j - 1];
    for (kvblock_side* side : {&copy.src, &copy.dst}) {
      side->strides[j] = side->strides[j - 1];
      side->table_strides[j] = side->table_strides[j - 1];
    }
  }
  ++copy.rank;
  for (int& dim : box) dim += dim > k ? 1 : 0;
  copy.dims[k] /= factor;
  copy.dims[k + 1] = factor;
  copy.src.strides[k] *= factor;
  copy.dst.strides[k] *= factor;
}

int64_t Tiling::Segment(const kvblock_side& side) const {
  int64_t segment = copy.unit;
  for (bool grew = true; grew;) {
    grew = false;
    for (int k : box) {
      if (side.strides[k] != segment || copy.dims[k] == 1) continue;
      segment *= copy.dims[k];
      grew = true;
      break;
    }
  }
  return segment;
}

int64_t Tiling::Width(const kvblock_side& side) const {
  // The dims of the segment itself do not count: vectors are what walks along them.
  const int64_t segment = Segment(side);
  kvblock_side loose = side;
  for (int k : box) {
    if (side.strides[k] < segment) loose.strides[k] = 0;
  }
  return CommonUnit(loose, copy.rank, segment);
}

// Takes the dims that continue one side's segment until it has kSegment bytes.
void Tiling::Lengthen(const kvblock_side& side, int64_t limit) {
  for (bool grew = true; grew && Segment(side) < kSegment;) {
    grew = false;
    for (int k = 0; k < copy.rank && !grew; ++k) {
      if (MayTake(k) && !Has(k) && side.strides[k] == Segment(side)) grew = Take(k, limit) > 1;
    }
  }
}

Tiling ChooseTiling(const kvblock_copy& copy, int64_t target, size_t max_rank) {
  Tiling best{copy, {}, 0};
  int64_t best_segment = 2 * std::max<int64_t>(copy.unit, 4) - 1;
  // The source may take a part of the tile, so that something is left for the destination.
  for (const int64_t part : {target, target / 4, target / 16}) {
    Tiling tiling{copy, {}, copy.unit};
    tiling.Lengthen(tiling.copy.src, part);
    tiling.Lengthen(tiling.copy.dst, target);
    // Grow by further dims, the innermost first: fewer, fuller tiles.
    for (int k = static_cast<int>(tiling.copy.rank) - 1; k >= 0; --k) {
      if (tiling.MayTake(k) && !tiling.Has(k)) tiling.Take(k, target);
    }
    const int64_t segment =
        std::min({tiling.Segment(tiling.copy.src), tiling.Segment(tiling.copy.dst), kSegment});
    if (segment > best_segment && tiling.box.size() <= max_rank) {
      best = tiling;
      best_segment = segment;
    }
  }
  return best;
}

}  // namespace kvblock
