// The team of threads: see threads.h.

#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace quire {
namespace {

// Some 20 to 100 us: longer than threads of a step usually wait for each other, shorter than what callers notice.
constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" takes no time there
#endif
}

// A counter. Threads wait until it changes: first they spin, then they sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1);
    // In this order, and in the opposite one below, so that a thread that goes to sleep is either seen or does not sleep.
    if (sleepers_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void wait_while(uint32_t seen) {
    for (int spin = 0; spin < kSpins; spin++) {
      if (value() != seen) return;
      pause();
    }
    sleepers_.fetch_add(1);
    while (value_.load() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1);
  }

 private:
  void futex(int operation, uint32_t number) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, number, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> value_{0}, sleepers_{0};
};

}  // namespace

class Team {
 public:
  void run(int64_t count, void (*function)(const void*, const Worker&), const void* context) {
    const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    count = lock.owns_lock() ? std::min(count, grow_to(count)) : 1;
    if (count <= 1) return function(context, Worker(this, 0, 1));
    function_ = function;
    context_ = context;
    count_ = count;
    for (int64_t index = 1; index < count; index++) starts_[index - 1]->advance();
    function(context, Worker(this, 0, count));
    wait_for_all(count);
  }

  // Who has arrived reads nothing of this run any more: the next one may have begun.
  void wait_for_all(int64_t count) {
    const uint32_t seen = passed_.value();
    if (arrived_.fetch_add(1) + 1 < count) return passed_.wait_while(seen);
    arrived_.store(0);
    next_.store(0);
    passed_.advance();
  }

  int64_t next() { return next_.fetch_add(1); }

 private:
  // The threads that there are then, the caller's own included.
  int64_t grow_to(int64_t count) {
    try {
      while (static_cast<int64_t>(starts_.size()) + 1 < std::min(count, limit_)) {
        starts_.push_back(std::make_unique<Signal>());
        const int64_t index = static_cast<int64_t>(starts_.size());
        std::thread([this, index, start = starts_.back().get()] { serve(index, *start); }).detach();
      }
    } catch (const std::system_error&) {  // too many threads
      starts_.pop_back();
      limit_ = 0;
    }
    return static_cast<int64_t>(starts_.size()) + 1;
  }

  void serve(int64_t index, Signal& start) {
    for (uint32_t seen = 0;; seen++) {
      start.wait_while(seen);
      const Worker worker(this, index, count_);
      function_(context_, worker);
      wait_for_all(worker.count);
    }
  }

  int64_t limit_ = std::numeric_limits<int64_t>::max();  // 0: no more threads can be started
  std::mutex busy_;                                      // held by the thread whose function runs
  void (*function_)(const void*, const Worker&) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> arrived_{0}, next_{0};
  Signal passed_;                               // at a barrier
  std::vector<std::unique_ptr<Signal>> starts_;  // of each thread but the caller's
};

namespace {

// Never destroyed, since its threads use it until the process ends. A forked process has none of the threads, so it
// starts with a new one.
Team* team = new Team;
[[maybe_unused]] const int forks = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

void run_on_team(int64_t count, void (*function)(const void*, const Worker&), const void* context) {
  team->run(count, function, context);
}

void Worker::wait_for_others() const { team_->wait_for_all(count); }
int64_t Worker::next() const { return team_->next(); }

}  // namespace quire
