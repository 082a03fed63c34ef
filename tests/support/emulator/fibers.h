// CTAs on a CPU, for cuda_runtime.h: those of a launch run one after the other; those of a cluster
// take turns, when one has no thread that can go on. Then what lies in shared memory changes places
// with what the other has there. The threads of a CTA are fibers; a fiber runs until it has to
// wait. Threads that wait for a barrier that the others never reach are an error.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "races.h"

struct uint3 {
  unsigned x, y, z;
};

inline uint3 threadIdx, blockIdx;
inline uint3 blockDim, gridDim;

namespace emulator {

constexpr int kSharedBytes = 232448, kWarp = 32;
alignas(1024) inline char shared[kSharedBytes];

constexpr int kDead = 70;  // the exit status; tests know it
[[noreturn]] inline void Die(const char* what) {
  std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::_Exit(kDead);  // this may be a fiber's stack
}

// What a fiber has of the processor while another runs. Where the architecture is known, a switch
// is a few instructions; swapcontext makes two calls of the system.
#if defined(__x86_64__)
struct Context {
  void* stack_pointer = nullptr;
};
asm(R"(
.pushsection .text
.local kvblock_emulator_switch
.type kvblock_emulator_switch, @function
kvblock_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.popsection
)");
extern "C" void kvblock_emulator_switch(Context* from, Context* to);
inline void Switch(Context* from, Context* to) { kvblock_emulator_switch(from, to); }
inline void Prepare(Context* context, char* stack, size_t bytes, void (*entry)()) {
  const auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16;
  void** place = reinterpret_cast<void**>(top) - 1;  // as if `entry` had been called
  *--place = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--place = nullptr;  // rbp, too: there frames end
  context->stack_pointer = place;
}
#else
struct Context {
  ucontext_t context;
};
inline void Switch(Context* from, Context* to) { swapcontext(&from->context, &to->context); }
inline void Prepare(Context* context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context->context);
  context->context.uc_stack.ss_sp = stack;
  context->context.uc_stack.ss_size = bytes;
  context->context.uc_link = nullptr;
  makecontext(&context->context, entry, 0);
}
#endif

constexpr size_t kStackBytes = 256 * 1024;

struct Cta;
struct Fiber {
  Context context;
  const char* stack = nullptr;
  Cta* of = nullptr;
  int thread = 0;
  bool done = false;
  bool in_cluster = false;  // between arriving at its cluster and waiting for it
  int asked = 0;            // whether something is there that others bring
};

// Where some threads wait for each other.
struct Barrier {
  int arrived = 0;
  std::vector<Fiber*> waiting;
  races::Handover handover;
};

// A barrier in shared memory.
struct SharedBarrier {
  int expected = 0, arrived = 0;
  int64_t bytes = 0;  // of bulk copies, still to come
  unsigned phase = 0;
  std::vector<Fiber*> waiting;
  // Arrivals that follow copies under way. They happen when somebody waits.
  std::vector<std::function<void()>> late;
  races::Handover handover;
};

struct Copy {
  char* to;
  const char* from;
  int bytes, zeros;
};

// The words that the lanes of a warp show each other. Two places in turn: nobody is two meetings
// ahead.
constexpr int kWords = 12;
struct Warp {
  Barrier barrier;
  uint32_t words[2][kWarp][kWords];
};

constexpr int kGroupOfWarps = 4;  // which multiply together

// What products of its warpgroup have to do with a thread's registers until it waits for them:
// sums, which are NaN there so long, and operands, which stay as they are.
struct Sums {
  float* to;
  int count, group;
  float values[128];
};
struct Operand {
  const uint32_t* at;
  uint32_t words[4];
  const float* sums;
};
struct Products {
  int group = 0;        // the one that is still open
  bool fenced = false;  // registers are as they should be
  std::vector<Sums> sums;
  std::vector<Operand> operands;
};

struct Cta {
  Context scheduler;
  std::vector<Fiber> fibers;
  std::deque<Fiber*> ready;
  Fiber* running = nullptr;
  int alive = 0;
  Barrier all;
  std::map<int, Barrier> named;
  std::map<uint32_t, SharedBarrier> in_shared;
  std::vector<Warp> warps;
  std::vector<Barrier> products;     // of each warpgroup
  std::vector<uintptr_t> issued_at;  // of each warpgroup, CallPath of the product it meets for
  std::vector<Products> pending;  // of each thread
  std::vector<int> meetings;      // of each thread with its warp
  std::vector<int> counts;        // of each thread, as below
  int counted[3] = {};  // votes of __syncthreads_count: of this time, the last and the next
  std::vector<std::vector<std::vector<Copy>>> groups;  // of each thread, the last still open
  const std::function<void()>* kernel = nullptr;
  uint3 block{};
  int rank = 0;               // in its cluster
  std::vector<char> outside;  // while another one runs: what lies in shared memory
};
inline Cta* cta = nullptr;

// The CTAs that run together, of which `cta` is one.
struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Barrier all;
  Barrier begun;  // hands on what was done before FenceBarrierInit
};
inline Cluster* cluster = nullptr;

// What kernels have as __shared__, if it has a place of its own.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_kvblock_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_kvblock_shared[];
EMULATOR_UNSEEN inline void CopyShared(std::vector<char>& outside, bool in) {
  const size_t variables = __stop_kvblock_shared - __start_kvblock_shared;
  outside.resize(kSharedBytes + variables);
  const auto copy = [&](char* place, char* at, size_t bytes) {
    if (bytes > 0) std::memcpy(in ? place : at, in ? at : place, bytes);
  };
  copy(shared, outside.data(), kSharedBytes);
  copy(__start_kvblock_shared, outside.data() + kSharedBytes, variables);
}
inline void ChangeTo(Cta* next) {
  if (cta == next) return;
  races::EnterCta(next->rank);
  if (cta != nullptr && cluster->ctas.size() > 1) CopyShared(cta->outside, false);
  if (!next->outside.empty()) CopyShared(next->outside, true);
  cta = next;
  blockIdx = cta->block;
}

inline void Run(Fiber* fiber) {
  threadIdx = {static_cast<unsigned>(fiber->thread), 0, 0};
  cta->running = fiber;
  races::running = cta->rank * static_cast<int>(cta->fibers.size()) + fiber->thread;
  Switch(&cta->scheduler, &fiber->context);
  races::running = -1;
}

inline void Sleep(std::vector<Fiber*>& waiting) {
  Fiber* const self = cta->running;
  waiting.push_back(self);
  Switch(&self->context, &cta->scheduler);
}
// Lets the other threads of this CTA go on first. What never comes, although they do nothing else
// than ask for it, will not come: a CTA waits for one that comes after it.
constexpr int kMostQuestions = 1 << 20;
inline void Yield() {
  Fiber* const self = cta->running;
  if (++self->asked > kMostQuestions) Die("asks for what never comes");
  cta->ready.push_back(self);
  Switch(&self->context, &cta->scheduler);
}
inline void Wake(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) fiber->of->ready.push_back(fiber);
  waiting.clear();
}

// Waits until so many threads are here; by Wait they also learn what the others have done.
inline void Meet(Barrier& barrier, int count) {
  if (++barrier.arrived < count) return Sleep(barrier.waiting);
  barrier.arrived = 0;
  Wake(barrier.waiting);
}
inline void Wait(Barrier& barrier, int count) {
  races::Release(barrier.handover);
  if (barrier.arrived + 1 == count) races::Complete(barrier.handover);
  Meet(barrier, count);
  races::Acquire(barrier.handover);
}

inline void Finish(const Copy& copy) {
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
  if (copy.zeros) std::memset(copy.to, 0, copy.zeros);
}

inline void Entry() {
  (*cta->kernel)();
  Fiber* const self = cta->running;
  if (!cta->pending[self->thread].sums.empty()) Die("products are under way at the end");
  self->done = true;
  --cta->alive;
  Switch(&self->context, &cta->scheduler);
}

// `ctas` of them, side by side from `first` on.
inline void RunCluster(uint3 first, int ctas, int threads, const std::function<void()>& kernel) {
  static std::vector<std::unique_ptr<char[]>> stacks;  // of all clusters, one after the other
  while (stacks.size() < static_cast<size_t>(ctas * threads)) {
    stacks.emplace_back(new char[kStackBytes]);
  }
  Cluster here;
  cluster = &here;
  races::BeginCluster(ctas, threads);
  for (int rank = 0; rank < ctas; ++rank) {
    Cta& own = *here.ctas.emplace_back(std::make_unique<Cta>());
    own.block = {first.x + rank, first.y, first.z};
    own.rank = rank;
    if (ctas > 1) own.outside.assign(kSharedBytes, static_cast<char>(0xff));
    own.kernel = &kernel;
    own.fibers.resize(threads);
    own.warps.resize((threads + kWarp - 1) / kWarp);
    own.products.resize(own.warps.size() / kGroupOfWarps);
    own.issued_at.resize(own.products.size());
    own.pending.resize(threads);
    own.meetings.resize(threads);
    own.counts.resize(threads);
    own.groups.assign(threads, {{}});
    own.alive = threads;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = own.fibers[i];
      fiber.of = &own;
      fiber.thread = i;
      fiber.stack = stacks[rank * threads + i].get();
      Prepare(&fiber.context, stacks[rank * threads + i].get(), kStackBytes, Entry);
      own.ready.push_back(&fiber);
    }
  }
  std::memset(shared, 0xff, sizeof(shared));
  for (bool some = true; some;) {
    some = false;
    for (const auto& own : here.ctas) {
      if (own->ready.empty()) continue;
      some = true;
      ChangeTo(own.get());
      while (!cta->ready.empty()) {
        Fiber* const fiber = cta->ready.front();
        cta->ready.pop_front();
        Run(fiber);
      }
    }
  }
  for (const auto& own : here.ctas) {
    ChangeTo(own.get());
    if (own->alive != 0) Die("the others wait for a barrier that some threads never reach");
    for (const auto& groups : own->groups) {
      for (size_t i = 0; i + 1 < groups.size(); ++i) {
        if (!groups[i].empty()) Die("asynchronous copies are under way at the end");
      }
    }
    for (const auto& [at, barrier] : own->in_shared) {
      if (!barrier.late.empty()) Die("bulk copies are under way at the end");
    }
  }
  cta = nullptr;
  cluster = nullptr;
}

// What every lane of this warp shows, once all have.
template <size_t kCount>
uint32_t (*Show(const std::array<uint32_t, kCount>& words)) [kWords] {
  static_assert(kCount <= kWords);
  const int thread = threadIdx.x;
  Warp& warp = cta->warps[thread / kWarp];
  auto& place = warp.words[cta->meetings[thread]++ % 2];
  std::copy(words.begin(), words.end(), place[thread % kWarp]);
  Meet(warp.barrier, kWarp);
  return place;
} inline uint32_t (*Show(uint32_t word)) [kWords] { return Show(std::array<uint32_t, 1>{word}); }

// A number for the calls that this thread is in, by where they return to (with frame pointers):
// threads that have another one are at another place of the program.
EMULATOR_UNSEEN inline uintptr_t CallPath() {
  const auto end = reinterpret_cast<uintptr_t>(cta->running->stack) + kStackBytes;
  const auto* frame = static_cast<const uintptr_t*>(__builtin_frame_address(0));
  uintptr_t path = 0;
  // The frame before; that of Entry has none on this stack.
  while (frame[0] > reinterpret_cast<uintptr_t>(frame) && frame[0] < end) {
    path = path * 31 + frame[1];
    frame = reinterpret_cast<const uintptr_t*>(frame[0]);
  }
  return path;
}

// The warps of a warpgroup start a product together, and the same one: that of the same place, or
// nothing is known of what comes of it. It orders nothing in memory.
inline void MeetForProduct() {
  constexpr int kThreads = kGroupOfWarps * kWarp;
  const unsigned group = threadIdx.x / kThreads;
  const uintptr_t path = CallPath();
  if (cta->products[group].arrived == 0) cta->issued_at[group] = path;
  if (cta->issued_at[group] != path) Die("warps of a warpgroup issue products of other places");
  Meet(cta->products[group], kThreads);
}

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float Float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
template <typename T>
uint32_t Word(T x) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
template <typename T>
T FromWord(uint32_t bits) {
  T x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Addresses of the shared window count from `shared`.
inline char* SharedPointer(uint32_t address) { return shared + static_cast<int32_t>(address); }

inline size_t launched_bytes = 0;  // of shared memory, that a CTA of this launch has
inline void CheckShared(uint32_t address, size_t bytes, const char* what) {
  if (address + bytes > launched_bytes) Die(what);
}

}  // namespace emulator
