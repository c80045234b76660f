// Runs the blocks of a CUDA kernel on the CPU, one after another, those of a cluster together. A thread is a fiber; warp, block and
// cluster collectives are barriers between fibers. What runs by itself on a GPU (cp.async, the copy engine, products of warpgroups) is
// done either at once or only when waited for, and the order of fibers is shuffled, so that a missing wait or barrier shows. On request
// warps stall at random as well, for so long that the others leave them far behind.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Dim3 {
  unsigned x, y, z;
};
struct Copy {
  unsigned char* target;
  const void* source;
  int bytes, size;
};
struct Fiber {
  void* stack_pointer = nullptr;
  unsigned char* stack = nullptr;
  Dim3 thread{};
  int rank = 0;  // of its block in the cluster
  bool done = false;
  std::vector<std::vector<Copy>> groups;  // committed and not yet landed
  std::vector<Copy> open;
  std::vector<std::vector<std::function<void()>>> stores;  // by the copy engine, that have yet to read shared memory
  std::vector<std::function<void()>> open_stores;
  int products = 0;               // of its warp, issued so far
  std::vector<int> product_ends;  // of committed groups that were not waited for
  const char* waits_for = nullptr;
  int which = 0;
  int polls = 0;                // of a barrier in a loop of the kernel's own, without success
  unsigned cluster_phase = 0;  // of the cluster's barrier, when it arrived there
};
struct Barrier {
  int waiting = 0;
  unsigned generation = 0;
  int alive = 0;
};
struct WarpSlots {
  uint64_t value[32];
  uint32_t a[32][4], b[32][2];
};

// A product of a warpgroup, as one warp takes part in it: registers of its lanes and what they name.
struct Product {
  float* sums[32];
  const uint32_t* rows[32];  // a, where it is in registers
  uint64_t a, b;
  bool keep;
  void (*multiply)(const Product&);
  const void* form = nullptr;  // what else `multiply` has to know
};
struct WarpProducts {
  std::vector<Product> issued;
  int done = 0;
};

inline bool lazy_copies = false, stalls = false;
inline int patience = 1000000;  // how often a thread looks in vain for what it waits for
inline std::mt19937 order(1);
inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warp_barriers;
inline std::vector<WarpSlots> warp_slots;
inline std::vector<WarpProducts> warp_products;
constexpr int kMaxCluster = 8, kSharedBytes = 256 * 1024;
inline Barrier block_barriers[kMaxCluster], cluster_barrier;
inline Barrier named_barriers[kMaxCluster][16];
struct Box {
  uint32_t barrier;  // place in the memory of the cluster
  std::function<void()> copy;
};
inline std::vector<Box> boxes;  // of the copy engine, that land when their barrier is waited for
// Lanes of a warp that passed a wait for an mbarrier, and when.
struct Passed {
  uint32_t parity = 0, lanes = 0;
  unsigned round = 0;  // of the warp
};
inline std::unordered_map<uint64_t, Passed> passed;  // by warp and barrier
inline std::vector<unsigned> warp_rounds;            // of the scheduler in which a warp ran
inline int block_threads, cluster_blocks;
inline Fiber* current = nullptr;
inline void* scheduler_stack_pointer = nullptr;
inline std::function<void()> body;
inline Dim3 block_index, grid_size;
alignas(1024) inline unsigned char cluster_shared[kMaxCluster][kSharedBytes];
inline unsigned char* dynamic_shared = cluster_shared[0];  // of the block whose thread runs

extern "C" void emulator_switch(void** from, void* to);
__asm__(R"(
.weak emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void yield() { emulator_switch(&current->stack_pointer, scheduler_stack_pointer); }
inline int thread() { return static_cast<int>(current->thread.x); }
inline int warp() { return current->rank * ((block_threads + 31) / 32) + thread() / 32; }  // of the cluster

inline void release(Barrier& barrier) {
  if (barrier.waiting == barrier.alive && barrier.alive > 0) {
    barrier.waiting = 0;
    ++barrier.generation;
  }
}
// A thread that has been resumed so often without what it waits for waits for ever; then it is told what each warp waits for.
inline void yield_or_abort(int& turns, const char* what, int which) {
  current->waits_for = what;
  current->which = which;
  if (++turns > patience) {
    std::fprintf(stderr, "emulator: thread %d waits for ever; by block and warp wait\n", thread());
    for (const Fiber& f : fibers) {
      if (f.waits_for != nullptr && (&f == &fibers[0] || f.thread.x % 32 == 0 || f.waits_for != (&f)[-1].waits_for || f.which != (&f)[-1].which)) {
        std::fprintf(stderr, "  %d.%u lane %u ..: for %s %d\n", f.rank, f.thread.x / 32, f.thread.x % 32, f.waits_for, f.which);
      }
    }
    std::abort();
  }
  yield();
  current->waits_for = nullptr;
}
inline void wait(Barrier& barrier, const char* what, int which = 0) {
  const unsigned generation = barrier.generation;
  ++barrier.waiting;
  release(barrier);
  for (int turns = 0; barrier.generation == generation;) yield_or_abort(turns, what, which);
}
inline void warp_wait() { wait(warp_barriers[warp()], "its warp", warp()); }
inline void block_wait() { wait(block_barriers[current->rank], "its block", current->rank); }

inline void land(const Copy& copy) {
  std::memset(copy.target, 0, copy.size);
  if (copy.bytes > 0) std::memcpy(copy.target, copy.source, copy.bytes);
}
inline void copy_async(uint32_t shared, const void* source, int bytes, int size) {
  const Copy copy{dynamic_shared + shared, source, bytes, size};
  if (lazy_copies) {
    current->open.push_back(copy);
  } else {
    land(copy);
  }
}
// Where a place in the shared memory of block `rank` lies in that of the cluster.
inline uint32_t in_cluster(int rank, uint32_t shared) { return static_cast<uint32_t>(rank) * kSharedBytes + shared; }
inline void land_boxes(uint32_t barrier) {
  for (size_t i = 0; i < boxes.size();) {
    if (boxes[i].barrier == barrier) {
      const std::function<void()> copy = std::move(boxes[i].copy);
      boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(i));
      copy();
    } else {
      ++i;
    }
  }
}
// Products are issued, and waited for, by whole warps.
inline void issue(const Product& one, float* sums, const uint32_t* rows) {
  WarpProducts& own = warp_products[warp()];
  const int index = current->products++, lane = thread() % 32;
  if (index == static_cast<int>(own.issued.size())) own.issued.push_back(one);
  Product& product = own.issued[index];
  if (product.a != one.a || product.b != one.b || product.keep != one.keep || product.multiply != one.multiply || product.form != one.form) {
    std::fprintf(stderr, "emulator: lanes of a warp issue different products\n"), std::abort();
  }
  product.sums[lane] = sums;
  product.rows[lane] = rows;
}
inline void finish_products(int end) {
  WarpProducts& own = warp_products[warp()];
  warp_wait();
  for (; own.done < end; ++own.done) own.issued[own.done].multiply(own.issued[own.done]);
  warp_wait();
}
inline void wait_products(int pending) {
  std::vector<int>& ends = current->product_ends;
  const int over = static_cast<int>(ends.size()) - pending;
  if (over <= 0) return;
  const int end = ends[over - 1];
  ends.erase(ends.begin(), ends.begin() + over);
  if (lazy_copies) finish_products(end);
}
inline void wait_stores(int pending) {
  auto& groups = current->stores;
  while (static_cast<int>(groups.size()) > pending) {
    for (const auto& store : groups.front()) store();
    groups.erase(groups.begin());
  }
}

inline void commit() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
inline void wait_groups(int pending) {
  auto& groups = current->groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

inline void entry() {
  body();
  if (!current->groups.empty() && lazy_copies) {
    for (auto& group : current->groups) {
      if (!group.empty()) std::fprintf(stderr, "emulator: a thread ended with copies in flight\n"), std::abort();
    }
  }
  if (!current->stores.empty() || !current->open_stores.empty()) {
    std::fprintf(stderr, "emulator: a thread ended while its stores read shared memory\n"), std::abort();
  }
  if (!current->product_ends.empty()) std::fprintf(stderr, "emulator: a thread ended with products under way\n"), std::abort();
  current->done = true;
  --warp_barriers[warp()].alive;
  --block_barriers[current->rank].alive;
  --cluster_barrier.alive;
  release(warp_barriers[warp()]);
  release(block_barriers[current->rank]);
  release(cluster_barrier);
  yield();
  std::abort();
}

// Blocks first .. first + blocks - 1 along x.
inline void run_cluster(Dim3 first, int blocks, int threads) {
  constexpr size_t kStack = 256 * 1024;
  const int all = blocks * threads, warps = blocks * ((threads + 31) / 32);
  block_threads = threads;
  cluster_blocks = blocks;
  if (static_cast<int>(fibers.size()) < all) fibers.resize(all);
  warp_barriers.assign(warps, Barrier{0, 0, 32});
  warp_slots.resize(warps);
  warp_products.assign(warps, WarpProducts{});
  for (int rank = 0; rank < blocks; ++rank) block_barriers[rank] = Barrier{0, 0, threads};
  cluster_barrier = Barrier{0, 0, all};
  for (auto& of_block : named_barriers) {
    for (Barrier& barrier : of_block) barrier = Barrier{};
  }
  passed.clear();
  warp_rounds.assign(warps, 1000);
  std::memset(cluster_shared, 0xff, static_cast<size_t>(blocks) * kSharedBytes);  // NaN in every type
  std::vector<int> queue(all);
  for (int i = 0; i < all; ++i) {
    Fiber& f = fibers[i];
    if (f.stack == nullptr) f.stack = static_cast<unsigned char*>(std::aligned_alloc(64, kStack));
    f.thread = {static_cast<unsigned>(i % threads), 0, 0};
    f.rank = i / threads;
    f.done = false;
    f.groups.clear();
    f.open.clear();
    f.stores.clear();
    f.open_stores.clear();
    f.products = 0;
    f.product_ends.clear();
    f.waits_for = nullptr;
    f.polls = 0;
    void** top = reinterpret_cast<void**>(f.stack + kStack - 64);
    *--top = nullptr;                           // return address of entry, never used; keeps the stack aligned
    *--top = reinterpret_cast<void*>(&entry);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    f.stack_pointer = top;
    queue[i] = i;
  }
  std::vector<int> asleep(warps, 0);  // rounds that a warp still does not run
  while (!queue.empty()) {
    std::shuffle(queue.begin(), queue.end(), order);
    if (stalls && order() % 16 == 0) asleep[order() % warps] = order() % 500;
    for (int w = 0; w < warps; ++w) {
      asleep[w] = std::max(asleep[w] - 1, 0);
      warp_rounds[w] += asleep[w] == 0;
    }
    for (int i : queue) {
      if (asleep[i / threads * ((threads + 31) / 32) + i % threads / 32] > 0) continue;
      current = &fibers[i];
      block_index = {first.x + current->rank, first.y, first.z};
      dynamic_shared = cluster_shared[current->rank];
      emulator_switch(&scheduler_stack_pointer, current->stack_pointer);
    }
    queue.erase(std::remove_if(queue.begin(), queue.end(), [](int i) { return fibers[i].done; }), queue.end());
  }
  if (!boxes.empty()) std::fprintf(stderr, "emulator: %zu boxes land in the memory of a block that has ended\n", boxes.size()), std::abort();
}

template <class F>
void launch(const unsigned* grid, int cluster, int threads, int lazy, unsigned seed, F f) {
  lazy_copies = lazy & 1;
  stalls = lazy & 2;
  order.seed(seed);
  body = f;
  grid_size = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; ++z) {
    for (unsigned y = 0; y < grid[1]; ++y) {
      for (unsigned x = 0; x < grid[0]; x += cluster) run_cluster({x, y, z}, cluster, threads);
    }
  }
}

}  // namespace emulator

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define threadIdx (::emulator::current->thread)
#define blockIdx (::emulator::block_index)
#define gridDim (::emulator::grid_size)

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = (static_cast<uint64_t>(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>((both >> ((selector >> (4 * i) & 7) * 8)) & 0xff) << (8 * i);
  return result;
}
inline void __syncthreads() { emulator::block_wait(); }
inline void __syncwarp() { emulator::warp_wait(); }
inline bool __syncthreads_or(bool flag) {
  static int any = 0;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= flag;
  __syncthreads();
  return any != 0;
}
template <class V>
inline V emulator_from_lane(V value, int lane) {
  auto& slots = emulator::warp_slots[emulator::warp()].value;
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  slots[emulator::thread() % 32] = word;
  emulator::warp_wait();
  std::memcpy(&value, &slots[lane & 31], sizeof(value));
  emulator::warp_wait();
  return value;
}
template <class V>
inline V __shfl_sync(unsigned, V value, int lane) { return emulator_from_lane(value, lane); }
template <class V>
inline V __shfl_xor_sync(unsigned, V value, int mask) { return emulator_from_lane(value, emulator::thread() % 32 ^ mask); }
template <class V>
inline V __shfl_up_sync(unsigned, V value, int step) {
  const int lane = emulator::thread() % 32;
  return emulator_from_lane(value, lane >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned, bool flag) {
  auto& slots = emulator::warp_slots[emulator::warp()].value;
  slots[emulator::thread() % 32] = flag;
  emulator::warp_wait();
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= static_cast<unsigned>(slots[i] != 0) << i;
  emulator::warp_wait();
  return all;
}
inline bool __any_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) != 0; }
inline bool __all_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) == 0xffffffffu; }
inline int atomicMax(int* target, int value) {
  const int old = *target;
  *target = std::max(old, value);
  return old;
}
inline int atomicAdd(int* target, int value) {
  const int old = *target;
  *target = old + value;
  return old;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto& slots = emulator::warp_slots[emulator::warp()].value;
  slots[emulator::thread() % 32] = value;
  emulator::warp_wait();
  unsigned most = 0;
  for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<unsigned>(slots[i]));
  emulator::warp_wait();
  return most;
}
inline unsigned __match_any_sync(unsigned, int value) {
  auto& slots = emulator::warp_slots[emulator::warp()].value;
  slots[emulator::thread() % 32] = static_cast<unsigned>(value);
  emulator::warp_wait();
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= static_cast<unsigned>(slots[i] == static_cast<unsigned>(value)) << i;
  emulator::warp_wait();
  return same;
}
