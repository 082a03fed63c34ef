// block_copy on the CPU.
//
// A simplified copy is an odometer of outer loops over boxes of runs. Boxes are grouped into chunks
// of about 256 KiB that the calling thread and any lent threads take from one counter, so the call
// never waits for a thread that has not started.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "host/block_copy_check.h"
#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_cpu_box.h"

namespace kvblock {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;
constexpr int64_t kStreamBytes = 8 << 20;  // beyond this the result will not stay in cache
constexpr int64_t kFetchBytes = 8 << 10;   // boxes up to this are fetched ahead
constexpr int64_t kLine = 64;

// One dim of the copy: steps inside a buffer and from buffer to buffer.
struct Loop {
  int64_t count, src, dst, src_table, dst_table;

  // How far neighbours lie apart on the side where they are nearer.
  int64_t Reach() const { return src == 0 || dst == 0 ? std::max(src, dst) : std::min(src, dst); }
  bool JumpsPages() const { return std::max(src, dst) >= 4096; }
};

// Where one side's current item and start lie, and whether they exist at all.
struct Place {
  int64_t offset = 0, table = 0;
  bool valid = true;
};

Place Locate(const kvblock_side& side, int64_t item) {
  Place place{side.offset, 0, true};
  if (side.ids != nullptr) {
    const int64_t id = side.ids[item];
    if (id < 0 || id >= side.id_limit) return {0, 0, false};
    place.offset +=
        (id / side.id_inner) * side.id_outer_stride + (id % side.id_inner) * side.id_inner_stride;
  }
  if (side.start != nullptr) {
    const int64_t start = *side.start;
    if (start < 0 || start >= side.start_limit) return {0, 0, false};
    place.offset += start * side.start_stride;
    place.table += start * side.start_table_stride;
  }
  return place;
}

// A box as one side holds it: segments of `bytes` in a row. Small boxes that lie apart are over
// before the hardware foresees them, so each is fetched while the one before it is copied (10-byte
// runs into and out of per-layer pools: twice as fast).
struct Segments {
  int64_t bytes = 0;  // 0: nothing worth fetching
  int64_t counts[Box::kDims], steps[Box::kDims];

  Segments() = default;
  Segments(const Box& box, int64_t BoxDim::* step) : bytes(box.bytes) {
    for (int i = 0; i < Box::kDims; ++i) {
      counts[i] = box.dims[i].count;
      steps[i] = box.dims[i].*step;
    }
    for (bool grew = true; grew;) {
      grew = false;
      for (int i = 0; i < Box::kDims; ++i) {
        if (counts[i] == 1 || steps[i] != bytes) continue;
        bytes *= counts[i];
        counts[i] = 1;
        grew = true;
      }
    }
    if (bytes < kLine) bytes = 0;
  }

  // Unless `box` simply goes on where the one before it ended. Inlined, or GCC takes it for a
  // function without effects and drops the call.
  inline __attribute__((always_inline)) void Fetch(const char* box, const char* before_end) const {
    if (bytes == 0 || box == nullptr || box == before_end) return;
    for (int64_t i = 0; i < counts[0]; ++i) {
      for (int64_t j = 0; j < counts[1]; ++j) {
        for (int64_t k = 0; k < counts[2]; ++k) {
          const char* segment = box + i * steps[0] + j * steps[1] + k * steps[2];
          for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(segment + at);
        }
      }
    }
  }
};

// The largest power of two up to 64 that divides every address and length of the side's runs.
int64_t RunAlignment(const kvblock_side& side, int64_t rank, int64_t run_bytes) {
  uint64_t bits = static_cast<uint64_t>(side.offset | run_bytes | 64);
  for (int64_t i = 0; i < side.num_buffers; ++i) {
    bits |= reinterpret_cast<uintptr_t>(side.buffers[i]);
  }
  for (int64_t k = 0; k < rank; ++k) bits |= static_cast<uint64_t>(side.strides[k]);
  if (side.ids != nullptr) {
    bits |= static_cast<uint64_t>(side.id_outer_stride | side.id_inner_stride);
  }
  if (side.start != nullptr) bits |= static_cast<uint64_t>(side.start_stride);
  return static_cast<int64_t>(bits & (~bits + 1));
}

class Job {
 public:
  explicit Job(const kvblock_copy& copy)
      : copy_(copy), indexed_(copy.src.ids != nullptr || copy.dst.ids != nullptr) {
    const int last = static_cast<int>(copy.rank) - 1;
    const bool run = copy.src.strides[last] == copy.unit && copy.dst.strides[last] == copy.unit &&
                     copy.src.table_strides[last] == 0 && copy.dst.table_strides[last] == 0 &&
                     !(last == 0 && indexed_);
    box_.bytes = run ? copy.dims[last] * copy.unit : copy.unit;
    outer_ = run ? last : last + 1;
    for (int k = 0; k < outer_; ++k) {
      loops_[k] = {copy.dims[k], copy.src.strides[k], copy.dst.strides[k],
                   copy.src.table_strides[k], copy.dst.table_strides[k]};
    }
    const int64_t alignment = RunAlignment(copy.dst, outer_, box_.bytes);
    const bool stream = NumCoordinates(copy) * copy.unit >= kStreamBytes;
    copier_ = ChooseCopyBox(box_.bytes, alignment, stream);
    SortLoops();
    FillBox();
    total_ = 1;
    for (int k = 0; k < outer_; ++k) total_ *= loops_[k].count;
    if (cut_ == nullptr && box_bytes_ <= kFetchBytes) {
      from_ = Segments(box_, &BoxDim::src);
      // Stores past the cache want nothing in it.
      if (!(stream && (alignment | box_.bytes) % 64 == 0)) to_ = Segments(box_, &BoxDim::dst);
    }
    per_chunk_ = std::max<int64_t>(1, kChunkBytes / box_bytes_);
    chunks_ = (total_ + per_chunk_ - 1) / per_chunk_;
  }

  int64_t chunks() const { return chunks_; }
  bool Finished() const { return done_.load(std::memory_order_acquire) == chunks_; }

  void Work() {
    for (int64_t c; (c = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) {
      RunChunk(c * per_chunk_, std::min((c + 1) * per_chunk_, total_));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

 private:
  void SortLoops() {
    Loop* first = loops_ + (indexed_ ? 1 : 0);
    Loop* end = loops_ + outer_;
    first = std::stable_partition(
        first, end, [](const Loop& loop) { return loop.src_table != 0 || loop.dst_table != 0; });
    fixed_ = static_cast<int>(first - loops_);
    // Near steps innermost, whichever side they are near on, so that a box stays in cache. Of two
    // equally near loops, runs that are streamed take the source's order (NHD to HND of llama-8b:
    // 31 GB/s against 28). Others take the destination's, but a loop that jumps pages on either
    // side goes inside (NHD to universal, 10-byte runs: 31 GB/s against 22).
    std::stable_sort(first, end, [this](const Loop& a, const Loop& b) {
      if (a.Reach() != b.Reach()) return a.Reach() > b.Reach();
      if (box_.bytes % 64 == 0) return a.src > b.src;
      return !a.JumpsPages() && b.JumpsPages();
    });
  }

  // Moves the innermost loops into the box, up to a chunk's bytes, and cuts the first one that does
  // not fit.
  void FillBox() {
    box_bytes_ = box_.bytes;
    if (box_.bytes > 2 * kChunkBytes) {
      Cut(kChunkBytes, box_.bytes, 1, 1, &box_.bytes);
      return;
    }
    for (int slot = Box::kDims - 1; slot >= 0 && outer_ > fixed_; --slot) {
      const Loop loop = loops_[outer_ - 1];
      const int64_t fit = std::max<int64_t>(1, kChunkBytes / box_bytes_);
      box_.dims[slot] = {loop.count, loop.src, loop.dst};
      --outer_;
      if (loop.count > fit) {
        Cut(fit, loop.count, loop.src, loop.dst, &box_.dims[slot].count);
        return;
      }
      box_bytes_ *= loop.count;
    }
  }

  // Makes the last box pass of `count` steps several, of `each` steps and what remains.
  void Cut(int64_t each, int64_t count, int64_t src, int64_t dst, int64_t* cut) {
    cut_each_ = *cut = each;
    cut_count_ = count;
    cut_ = cut;
    loops_[outer_++] = {(count + each - 1) / each, each * src, each * dst, 0, 0};
    box_bytes_ = cut == &box_.bytes ? each : box_bytes_ * each;
  }

  // Finds the first box by division and turns the odometer to the others.
  void RunChunk(int64_t begin, int64_t end) const {
    int64_t coord[KVBLOCK_MAX_RANK + 1] = {};
    int64_t index = begin;
    Place src, dst;  // of the loops alone
    for (int k = outer_ - 1; k >= 0; --k) {
      coord[k] = index % loops_[k].count;
      index /= loops_[k].count;
      src.offset += coord[k] * loops_[k].src;
      dst.offset += coord[k] * loops_[k].dst;
      src.table += coord[k] * loops_[k].src_table;
      dst.table += coord[k] * loops_[k].dst_table;
    }
    int64_t item = coord[0];
    Place src_item = Locate(copy_.src, item), dst_item = Locate(copy_.dst, item);
    Box box = box_;
    int64_t* const cut = cut_ == nullptr ? nullptr
                         : cut_ == &box_.bytes
                             ? &box.bytes
                             : &box.dims[reinterpret_cast<const BoxDim*>(cut_) - box_.dims].count;
    const auto at = [](const kvblock_side& side, const Place& item, const Place& loops) {
      if (!item.valid) return static_cast<char*>(nullptr);
      char* buffer = static_cast<char*>(side.buffers[item.table + loops.table]);
      return buffer + item.offset + loops.offset;
    };
    const char* from = at(copy_.src, src_item, src);
    char* to = at(copy_.dst, dst_item, dst);
    for (int64_t i = begin; i < end; ++i) {
      if (cut != nullptr) *cut = std::min(cut_each_, cut_count_ - coord[outer_ - 1] * cut_each_);
      for (int k = outer_ - 1; k >= 0; --k) {
        const Loop& loop = loops_[k];
        const int64_t steps = ++coord[k] < loop.count ? 1 : 1 - loop.count;
        src.offset += steps * loop.src;
        dst.offset += steps * loop.dst;
        src.table += steps * loop.src_table;
        dst.table += steps * loop.dst_table;
        if (steps == 1) break;
        coord[k] = 0;
      }
      const char* next_from = nullptr;
      char* next_to = nullptr;
      if (i + 1 < end) {
        if (coord[0] != item && indexed_) {
          item = coord[0];
          src_item = Locate(copy_.src, item);
          dst_item = Locate(copy_.dst, item);
        }
        next_from = at(copy_.src, src_item, src);
        next_to = at(copy_.dst, dst_item, dst);
      }
      from_.Fetch(next_from, from == nullptr ? nullptr : from + box_bytes_);
      to_.Fetch(next_to, to == nullptr ? nullptr : to + box_bytes_);
      if (to != nullptr && from != nullptr) copier_(box, from, to);
      if (to != nullptr && from == nullptr) ZeroBox(box, to);
      from = next_from;
      to = next_to;
    }
  }

  const kvblock_copy copy_;
  const bool indexed_;  // ids are looked up along loop 0
  Loop loops_[KVBLOCK_MAX_RANK + 1];
  int outer_ = 0, fixed_ = 0;  // loops that the odometer turns; that cannot be moved
  Box box_;
  CopyBox copier_ = nullptr;
  int64_t* cut_ = nullptr;
  int64_t cut_each_ = 0, cut_count_ = 0, box_bytes_ = 0;
  Segments from_, to_;  // what to fetch of the next box
  int64_t total_ = 0, per_chunk_ = 1, chunks_ = 0;
  std::atomic<int64_t> next_{0}, done_{0};
};

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_copy_cpu(const kvblock_copy* copy, int64_t num_threads,
                                        kvblock_schedule schedule, void* context) {
  if (const char* error = kvblock_copy_check(copy)) return error;
  if (kvblock::NumCoordinates(*copy) == 0) return nullptr;
  auto job = std::make_shared<kvblock::Job>(kvblock::Simplify(*copy, 16));
  const int64_t helpers = schedule ? std::clamp<int64_t>(num_threads, 1, job->chunks()) - 1 : 0;
  using Held = std::shared_ptr<kvblock::Job>;  // keeps the job alive for a task that starts late
  for (int64_t i = 0; i < helpers; ++i) {
    schedule(
        context,
        [](void* data) {
          std::unique_ptr<Held> held(static_cast<Held*>(data));
          (*held)->Work();
        },
        new Held(job));
  }
  job->Work();
  while (!job->Finished()) std::this_thread::yield();
  return nullptr;
}
