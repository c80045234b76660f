// Threads of the CPU backend. No OpenMP: its pools do not survive fork. This one is made anew in a child.
#pragma once

#include <tvm/ffi/error.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include <immintrin.h>
#include <pthread.h>

namespace kernelgen {

using KernelEntry = void (*)(const void* params, int64_t task, void* scratch);

// Per-thread memory, 64-byte aligned, grown as needed and kept until the thread ends.
class Scratch {
 public:
  void* Get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) & ~size_t{4095};
      data_ = std::aligned_alloc(64, size_);
      if (!data_) {
        size_ = 0;
        TVM_FFI_THROW(MemoryError) << "no memory for " << bytes << " bytes of kernel scratch";
      }
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

class ThreadPool {
 public:
  // Runs entry(params, 0 .. num_tasks-1, scratch) on up to num_threads threads, the caller being one of them.
  static void Run(KernelEntry entry, const void* params, int64_t num_tasks, int num_threads, size_t scratch_bytes) {
    if (num_tasks <= 0) return;
    const int wanted = static_cast<int>(num_tasks < num_threads ? num_tasks : num_threads);
    ThreadPool* pool = wanted > 1 ? Current() : nullptr;
    // A second Python thread that calls meanwhile works alone: never waits for the first, never deadlocks.
    if (pool && pool->busy_.try_lock()) {
      std::lock_guard<std::mutex> release(pool->busy_, std::adopt_lock);
      pool->RunShared(entry, params, num_tasks, wanted, scratch_bytes);
      return;
    }
    void* scratch = ThreadScratch().Get(scratch_bytes);
    for (int64_t task = 0; task < num_tasks; ++task) entry(params, task, scratch);
  }

 private:
  struct Job {
    KernelEntry entry = nullptr;
    const void* params = nullptr;
    int64_t num_tasks = 0;
    size_t scratch_bytes = 0;
    int helpers = 0;  // workers that take part
  };

  static Scratch& ThreadScratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  static std::atomic<ThreadPool*>& Slot() {
    static std::atomic<ThreadPool*> slot{nullptr};
    return slot;
  }

  static ThreadPool* Current() {
    ThreadPool* pool = Slot().load(std::memory_order_acquire);
    if (pool) return pool;
    // Threads do not survive fork and the old pool's locks may be held for ever: a child forgets it.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { Slot().store(nullptr, std::memory_order_release); });
    (void)registered;
    auto* fresh = new ThreadPool;  // never freed: its detached threads may outlive static destructors
    if (Slot().compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;
    return pool;
  }

  void RunShared(KernelEntry entry, const void* params, int64_t num_tasks, int wanted, size_t scratch_bytes) {
    // A worker that could not allocate or start leaves its share to the others: tasks are taken one by one.
    try {
      while (num_workers_ < wanted - 1) {
        std::thread(&ThreadPool::Work, this, num_workers_).detach();
        ++num_workers_;
      }
    } catch (const std::system_error&) {
    }
    void* scratch = ThreadScratch().Get(scratch_bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = Job{entry, params, num_tasks, scratch_bytes, wanted - 1 < num_workers_ ? wanted - 1 : num_workers_};
      next_task_.store(0, std::memory_order_relaxed);
      running_.store(job_.helpers, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Drain(job_, scratch);
    Pause([&] { return running_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return running_.load(std::memory_order_acquire) == 0; });
  }

  void Drain(const Job& job, void* scratch) {
    for (int64_t task; (task = next_task_.fetch_add(1, std::memory_order_relaxed)) < job.num_tasks;)
      job.entry(job.params, task, scratch);
  }

  void Work(int index) {
    uint64_t seen = 0;
    for (;;) {
      Pause([&] { return generation_.load(std::memory_order_acquire) != seen; });
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        job = job_;
      }
      if (index >= job.helpers) continue;
      void* scratch = nullptr;
      try {
        scratch = ThreadScratch().Get(job.scratch_bytes);
      } catch (const tvm::ffi::Error&) {
      }
      if (scratch || job.scratch_bytes == 0) Drain(job, scratch);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  // A short spin before sleeping: waking through the kernel costs more than a small kernel runs.
  template <class Ready>
  static void Pause(Ready ready) {
    for (int i = 0; i < 2000 && !ready(); ++i) _mm_pause();
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  Job job_;
  std::atomic<int64_t> next_task_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> running_{0};
  int num_workers_ = 0;
};

}  // namespace kernelgen
