// A race checker for the shared memory of emulated CTAs: two accesses to a word, one of them a
// write, must be ordered by something that the kernel has waited for, not by luck.
//
// Kernels are compiled with -fsanitize=thread, which calls what is here before every access; this
// file is compiled without, and nothing is linked to the sanitizer's own library. Who accesses
// memory is an agent: a thread, or what works while threads go on: asynchronous copies and bulk
// stores of a thread, products of a warp, bulk loads that a barrier counts. An agent's time goes on
// when others can learn what it has done so far. A thread's clock says up to which time of every
// agent it knows what was done; barriers hand that on. What was done at a time that the clock of a
// thread has is ordered before what the thread does now, and before what it starts now. What it has
// started is known when it was waited for, not earlier.
//
// One thing is no race: 16 bytes of zeros over zeros. Several threads may clear the same memory for
// themselves, and each sees zeros from then on, whoever was first.
//
// As CUDA has it, votes, shuffles and products of a warp order nothing in memory; __syncwarp does.
// What threads and asynchronous copies write, bulk copies and products read by another way: between
// the two there must be a FenceAsync, too, of a thread that knows of the write. A second clock of a
// thread says what was fenced so. Nothing is said of other memory than that of CTAs.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <string>
#include <utility>

#include "cuda_runtime.h"

// Shared memory and what kernels have as __shared__ are among this library's variables.
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

namespace emulator::races {
namespace {

constexpr int kWordBytes = 4;
constexpr unsigned kWholeWord = (1u << kWordBytes) - 1;

struct Moment {
  int agent;
  uint32_t time;
  const void* code;
  unsigned bytes = kWholeWord;  // of the word: a bit each
};

// The last write, of time 0 if there is none, those before to bytes that it left alone, and since
// then those who wrote the same zeros, reads and atomics.
struct Word {
  Moment write{};
  std::vector<Moment> before, zeros, reads, atomics;
  bool used = false;
};

struct Agent {
  std::string name;
  bool is_fenced = true;  // nobody needs to fence what it writes
  uint32_t time = 0;
};
constexpr int kMostAgents = 3072;
using Clock = std::array<uint32_t, kMostAgents>;

struct Thread {
  Clock clock{}, fenced{};
  int engines[3] = {-1, -1, -1};  // agents
  std::deque<uint32_t> groups[3];
  int products = 0;
};

// Of memory of a CTA: the variables, then those that have a place of their own.
size_t Bytes() { return _end - __bss_start + (__stop_kvblock_shared - __start_kvblock_shared); }
size_t Offset(const volatile void* at) {
  const auto from = [&](const char* first) {
    return reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(first);
  };
  const size_t own = from(__start_kvblock_shared), variables = _end - __bss_start;
  if (own < static_cast<size_t>(__stop_kvblock_shared - __start_kvblock_shared)) {
    return (variables + kWordBytes - 1) / kWordBytes * kWordBytes + own;
  }
  return from(__bss_start) < variables ? from(__bss_start) : SIZE_MAX;
}

class Checker {
 public:
  void BeginCluster(int ctas, int threads_of_cta) {
    Settle();
    rank_ = 0;
    const int threads = ctas * threads_of_cta;
    agents_.clear();
    threads_.assign(threads, {});
    warps_.assign((threads + kWarp - 1) / kWarp + kGroupOfWarps, {});  // a last group is whole
    loads_.clear();
    for (int i = 0; i < threads; ++i) {
      threads_[i].clock[i] = agents_[NewAgent("thread", i, false)].time = 1;
    }
    for (Word* word : used_) *word = {};
    used_.clear();
    words_.resize(std::max(words_.size(), ctas * WordsOfCta()));
  }

  int EnterCta(int rank) {
    Settle();
    return std::exchange(rank_, rank);
  }

  Thread& Own() { return threads_[running]; }
  size_t Agents() const { return agents_.size(); }
  void Tick() {
    Settle();
    Own().clock[running] = ++agents_[running].time;
  }

  void Touch(Access access, const volatile void* at, int bytes, const void* code) {
    if (running < 0 || Offset(at) >= Bytes()) return;
    Settle();
    const Moment now{running, agents_[running].time, code};
    if (access == Access::kWrite && AreZeros(at, bytes)) {
      clearing_ = {at, now};
    } else {
      Record(access, at, bytes, Own().clock, now);
    }
  }
  // What is about to be written is known when something else happens.
  void Settle() {
    const auto [at, now] = std::exchange(clearing_, {});
    if (at == nullptr) return;
    if (!AreZeros(at, kZeroBytes)) {
      Record(Access::kWrite, at, kZeroBytes, threads_[now.agent].clock, now);
      return;
    }
    for (int i = 0; i < kZeroBytes / kWordBytes; ++i) {
      Remember(words_[FirstWord(at) + i].zeros, now);
    }
  }
  void Start(Engine engine, Access access, const void* at, int bytes, const void* code) {
    Settle();
    const int agent = AgentOf(engine);
    const bool product = engine == Engine::kProducts;
    if (!product) ++agents_[agent].time;
    Record(access, at, bytes, product ? lanes_ : Own().clock, {agent, agents_[agent].time, code},
           engine == Engine::kCopies ? nullptr
           : product                 ? &fenced_lanes_
                                     : &Own().fenced);
  }
  Event StartBulkLoad(uint32_t barrier, const void* to, int bytes, const void* code) {
    Settle();
    const auto found = loads_.find({rank_, barrier});
    const int agent = found != loads_.end()
                          ? found->second
                          : loads_[{rank_, barrier}] = NewAgent("a load of", barrier);
    ++agents_[agent].time;
    Record(Access::kWrite, to, bytes, Own().clock, {agent, agents_[agent].time, code});
    return {agent, agents_[agent].time};
  }

  void StartRead(Event load, const void* from, int bytes, const void* code) {
    Settle();
    Record(Access::kRead, from, bytes, Own().clock, {load.agent, load.time, code}, &Own().fenced);
  }

  // The first lane to come says it for all: the others are where they were when they met.
  bool StartProduct() {
    const int warp = running / kWarp;
    if (++Own().products == warps_[warp].products) return false;
    warps_[warp].products = Own().products;
    ++agents_[AgentOf(Engine::kProducts)].time;
    lanes_ = threads_[warp * kWarp].clock;
    fenced_lanes_ = threads_[warp * kWarp].fenced;
    for (int lane = 1; lane < kWarp; ++lane) {
      const Thread& other = threads_[warp * kWarp + lane];
      for (size_t i = 0; i < Agents(); ++i) {
        lanes_[i] = std::min(lanes_[i], other.clock[i]);
        fenced_lanes_[i] = std::min(fenced_lanes_[i], other.fenced[i]);
      }
    }
    return true;
  }

  Event Latest(Engine engine) {
    const int agent = AgentOf(engine);
    return {agent, agents_[agent].time};
  }
  void Commit(Engine engine) {
    Own().groups[static_cast<int>(engine)].push_back(Latest(engine).time);
  }
  // A group of products is its warpgroup's (PTX): what one warp has waited for all four have done.
  void Await(Engine engine, int pending) {
    auto& groups = Own().groups[static_cast<int>(engine)];
    if (groups.size() <= static_cast<size_t>(pending)) return;
    const uint32_t done = *(groups.end() - pending - 1);
    groups.erase(groups.begin(), groups.end() - pending);
    const auto learn = [&](int agent) { Own().clock[agent] = std::max(Own().clock[agent], done); };
    if (engine != Engine::kProducts) return learn(AgentOf(engine));
    const int first = running / kWarp / kGroupOfWarps * kGroupOfWarps;
    for (int warp = first; warp < first + kGroupOfWarps; ++warp) learn(AgentOfProducts(warp));
  }

  std::string TakeReport() {
    known_.clear();
    return std::exchange(report_, "");
  }

 private:
  struct Warp {
    int engine = -1, products = 0;
  };

  int NewAgent(const char* what, int number, bool is_fenced = true) {
    if (agents_.size() == kMostAgents) Die("the race checker has too few agents");
    agents_.push_back({std::string(what) + " " + std::to_string(number), is_fenced});
    return static_cast<int>(agents_.size()) - 1;
  }
  int AgentOf(Engine engine) {
    constexpr const char* kNames[] = {"a copy of thread", "a bulk store of thread"};
    if (engine == Engine::kProducts) return AgentOfProducts(running / kWarp);
    const int which = static_cast<int>(engine);
    int& agent = Own().engines[which];
    if (agent < 0) agent = NewAgent(kNames[which], running, engine != Engine::kCopies);
    return agent;
  }
  int AgentOfProducts(int warp) {
    int& agent = warps_[warp].engine;
    if (agent < 0) agent = NewAgent("a product of warp", warp);
    return agent;
  }

  static size_t WordsOfCta() { return Bytes() / kWordBytes + 2; }
  size_t FirstWord(const volatile void* at) const {
    return rank_ * WordsOfCta() + Offset(at) / kWordBytes;
  }

  static constexpr int kZeroBytes = 16;
  static bool AreZeros(const volatile void* at, int bytes) {
    constexpr char kZeros[kZeroBytes] = {};
    return bytes == kZeroBytes && std::memcmp(const_cast<const void*>(at), kZeros, bytes) == 0;
  }

  static void Remember(std::vector<Moment>& moments, const Moment& now) {
    for (Moment& m : moments) {
      if (m.agent == now.agent && m.bytes == now.bytes) return void(m = now);
    }
    moments.push_back(now);
  }
  // Forgets what a write to these bytes has covered.
  static void Cover(std::vector<Moment>& moments, unsigned bytes) {
    const auto covered = [bytes](const Moment& m) { return (m.bytes & ~bytes) == 0; };
    moments.erase(std::remove_if(moments.begin(), moments.end(), covered), moments.end());
  }
  // The bytes of word `i` that an access has.
  unsigned BytesOf(size_t i, const volatile void* at, int bytes) const {
    const int64_t first = static_cast<int64_t>(Offset(at) % kWordBytes) -
                          static_cast<int64_t>(i - FirstWord(at)) * kWordBytes;
    const int64_t from = std::max<int64_t>(first, 0),
                  to = std::min<int64_t>(first + bytes, kWordBytes);
    return ((1u << (to - from)) - 1) << from;
  }

  // fenced: of who reads as bulk copies do.
  void Record(Access access, const volatile void* at, int bytes, const Clock& clock, Moment now,
              const Clock* fenced = nullptr) {
    const size_t end = FirstWord(at) + (Offset(at) % kWordBytes + bytes - 1) / kWordBytes + 1;
    for (size_t i = FirstWord(at); i < end; ++i) {
      Word& word = words_[i];
      now.bytes = BytesOf(i, at, bytes);
      const auto knows = [&](const Moment& before) { return clock[before.agent] >= before.time; };
      const auto check = [&](const Moment& before, const char* what) {
        if ((before.bytes & now.bytes) != 0 && !knows(before)) Report(i, access, now, before, what);
      };
      const auto sees = [&](const Moment& before) {
        return knows(before) &&
               (access != Access::kRead || fenced == nullptr || agents_[before.agent].is_fenced ||
                (*fenced)[before.agent] >= before.time);
      };
      if (access != Access::kRead || std::none_of(word.zeros.begin(), word.zeros.end(), sees)) {
        check(word.write, "wrote");
        for (const Moment& m : word.before) check(m, "wrote");
        const auto check_fence = [&](const Moment& before) {
          if ((before.bytes & now.bytes) != 0 && knows(before) && !sees(before)) {
            Report(i, access, now, before, "wrote, and nobody fenced it,");
          }
        };
        check_fence(word.write);
        for (const Moment& m : word.before) check_fence(m);
      }
      if (access == Access::kBarrier) continue;
      if (!word.used) used_.push_back(&word);
      word.used = true;
      if (access != Access::kAtomic) {
        for (const Moment& m : word.atomics) check(m, "changed");
      }
      if (access == Access::kRead) {
        Remember(word.reads, now);
        continue;
      }
      for (const Moment& m : word.zeros) check(m, "cleared");
      for (const Moment& m : word.reads) check(m, "read");
      if (access == Access::kAtomic) {
        Remember(word.atomics, now);
      } else {
        Cover(word.before, now.bytes);
        if (word.write.time > 0 && (word.write.bytes & ~now.bytes) != 0) {
          word.before.push_back(word.write);
        }
        word.write = now;
        for (auto* since : {&word.zeros, &word.reads, &word.atomics}) Cover(*since, now.bytes);
      }
    }
  }

  void Report(size_t word, Access access, const Moment& now, const Moment& before,
              const char* what) {
    if (!known_.insert({now.code, before.code}).second) return;
    constexpr const char* kNames[] = {" reads ", " writes ", " changes ", " comes to "};
    const int64_t place = __bss_start + word % WordsOfCta() * kWordBytes - shared;
    const size_t block = blockIdx.x - cta->rank + word / WordsOfCta();
    report_ += "block " + std::to_string(block) + ": " + agents_[now.agent].name +
               kNames[static_cast<int>(access)] +
               (place >= 0 && place < kSharedBytes ? "byte " + std::to_string(place)
                                                   : std::string("a variable")) +
               " at " + CodeOf(now) + ", which " + agents_[before.agent].name + " " + what +
               " at " + CodeOf(before) + "\n";
  }
  // For addr2line.
  static std::string CodeOf(const Moment& m) {
    Dl_info info{};
    dladdr(m.code, &info);
    char text[32];
    std::snprintf(text, sizeof(text), "[%#tx]",
                  static_cast<const char*>(m.code) - static_cast<char*>(info.dli_fbase) - 1);
    return text;
  }

  std::vector<Agent> agents_;  // the threads come first
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::map<std::pair<int, uint32_t>, int> loads_;  // agents, by their CTAs and barriers
  int rank_ = 0;                                   // the CTA whose memory is used
  Clock lanes_{}, fenced_lanes_{};                 // what all lanes know that start a product
  std::vector<Word> words_;
  std::vector<Word*> used_;
  std::pair<const volatile void*, Moment> clearing_{};  // a write of a thread over zeros
  std::set<std::pair<const void*, const void*>> known_;
  std::string report_;
};

// Not among the library's variables: functions of its members may be instrumented, too.
Checker& checker = *new Checker;

}  // namespace

void BeginCluster(int ctas, int threads) { checker.BeginCluster(ctas, threads); }
int EnterCta(int rank) { return checker.EnterCta(rank); }

// A clock that knows more.
template <typename To, typename From>
void Learn(To& to, const From& from, size_t agents) {
  for (size_t i = 0; i < agents; ++i) to[i] = std::max(to[i], from[i]);
}

void Release(Handover& handover) {
  if (running < 0) return;
  const size_t agents = checker.Agents();
  handover.told.resize(agents);
  handover.told_fenced.resize(agents);
  Learn(handover.told, checker.Own().clock, agents);
  Learn(handover.told_fenced, checker.Own().fenced, agents);
  checker.Tick();
}
void Release(Handover& handover, Event event) {
  handover.told.resize(checker.Agents());
  handover.told[event.agent] = std::max(handover.told[event.agent], event.time);
}
void Acquire(const Handover& handover) {
  if (running < 0) return;
  checker.Settle();
  Learn(checker.Own().clock, handover.known, handover.known.size());
  Learn(checker.Own().fenced, handover.known_fenced, handover.known_fenced.size());
}
void Complete(Handover& handover) {
  handover.known.swap(handover.told);
  handover.told.clear();
  handover.known_fenced.swap(handover.told_fenced);
  handover.told_fenced.clear();
}
void Fence() {
  if (running < 0) return;
  checker.Settle();
  Learn(checker.Own().fenced, checker.Own().clock, checker.Agents());
  checker.Tick();  // what the thread writes from now on is another matter
}

void Touch(Access access, const volatile void* at, int bytes) {
  checker.Touch(access, at, bytes, __builtin_return_address(0));
}
void Start(Engine engine, Access access, const void* at, int bytes) {
  checker.Start(engine, access, at, bytes, __builtin_return_address(0));
}
void Commit(Engine engine) { checker.Commit(engine); }
void Await(Engine engine, int pending) { checker.Await(engine, pending); }
Event Latest(Engine engine) { return checker.Latest(engine); }
bool StartProduct() { return checker.StartProduct(); }
Event StartBulkLoad(uint32_t barrier, const void* to, int bytes) {
  return checker.StartBulkLoad(barrier, to, bytes, __builtin_return_address(0));
}

void StartRead(Event load, const void* from, int bytes) {
  checker.StartRead(load, from, bytes, __builtin_return_address(0));
}

}  // namespace emulator::races

// The races since this was asked before, a line each.
extern "C" const char* emulator_races() {
  static std::string report;
  report = emulator::races::checker.TakeReport();
  return report.c_str();
}

// ---- what -fsanitize=thread calls ----------------------------------------------------------

using emulator::races::Access;
using emulator::races::checker;
#define KVBLOCK_SEEN(name, bytes)                                          \
  extern "C" void __tsan_##name##read##bytes(void* at) {                   \
    checker.Touch(Access::kRead, at, bytes, __builtin_return_address(0));  \
  }                                                                        \
  extern "C" void __tsan_##name##write##bytes(void* at) {                  \
    checker.Touch(Access::kWrite, at, bytes, __builtin_return_address(0)); \
  }
KVBLOCK_SEEN(, 1)
KVBLOCK_SEEN(, 2)
KVBLOCK_SEEN(, 4)
KVBLOCK_SEEN(, 8)
KVBLOCK_SEEN(, 16)
KVBLOCK_SEEN(unaligned_, 2)
KVBLOCK_SEEN(unaligned_, 4)
KVBLOCK_SEEN(unaligned_, 8)
KVBLOCK_SEEN(unaligned_, 16)
extern "C" void __tsan_read_range(void* at, size_t bytes) {
  checker.Touch(Access::kRead, at, static_cast<int>(bytes), __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
  checker.Touch(Access::kWrite, at, static_cast<int>(bytes), __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
// What launchers remember, of 8 bits.
extern "C" char __tsan_atomic8_load(const volatile char* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
extern "C" void __tsan_atomic8_store(volatile char* at, char value, int) {
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}
