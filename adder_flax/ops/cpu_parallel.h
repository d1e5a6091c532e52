// Work shared out over the threads of XLA's pool, for the native CPU kernels of adder_flax.ops.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Runs work(0) ... work(count - 1) on the calling thread and on whichever threads of XLA's pool join in.
//
// The caller is a thread of that pool itself and may be its only free one, so it must never wait for a task that has
// not begun: it takes items from the same counter as the helpers do, and then waits only for items that a running
// thread holds. A helper that starts too late finds no item left; it shares ownership of the counter, not of `work`.
void ParallelFor(ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& work) {
  struct State {
    State(int64_t count, const std::function<void(int64_t)>& work) : count(count), work(work) {}

    void TakeItems() {
      for (int64_t item; (item = next.fetch_add(1)) < count;) {
        work(item);
        if (finished.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          all_finished.notify_all();
        }
      }
    }

    const int64_t count;
    const std::function<void(int64_t)>& work;
    std::atomic<int64_t> next{0}, finished{0};
    std::mutex mutex;
    std::condition_variable all_finished;
  };
  auto state = std::make_shared<State>(count, work);
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->TakeItems(); });
  state->TakeItems();
  // What is left ends soon, mostly before a thread that sleeps would be awake again.
  for (int i = 0; i < 200 && state->finished != count; ++i) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished == count; });
}

}  // namespace
