// A pool of threads, a team, which run a function together and wait for each other in it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

class Team;

// One of the threads that run a function together. All of them must call its methods in the same order.
class Worker {
 public:
  const int64_t index, count;

  Worker(Team* team, int64_t an_index, int64_t a_count) : index(an_index), count(a_count), team_(team) {}

  // Returns when all workers have called it.
  void barrier() const {
    if (count > 1) wait_for_others();
  }

  // The first of `n` things that are this worker's share. The share ends where that of the next worker begins.
  int64_t begin_of(int64_t n) const { return n * index / count; }
  int64_t end_of(int64_t n) const { return n * (index + 1) / count; }

  // Calls body(i) for each i below n, which are divided into equal shares, and returns when all workers are done.
  template <typename Body>
  void for_shares(int64_t n, Body body) const {
    for (int64_t i = begin_of(n); i < end_of(n); i++) body(i);
    barrier();
  }

  // Calls body(i) for each i below n, the next one on whichever worker is free, and returns when all workers are done.
  template <typename Body>
  void for_each(int64_t n, Body body) const {
    if (count == 1) {
      for (int64_t i = 0; i < n; i++) body(i);
      return;
    }
    for (int64_t i = next(); i < n; i = next()) body(i);
    barrier();
  }

 private:
  void wait_for_others() const;
  int64_t next() const;

  Team* team_;
};

void run_on_team(int64_t count, void (*function)(const void*, const Worker&), const void* context);

// Calls body(worker) on up to `count` threads, the caller's own included, and returns when all are done. On fewer if no
// more can be started, and on the caller's alone while another thread's call runs.
template <typename Body>
void run_together(int64_t count, const Body& body) {
  const auto call = [](const void* context, const Worker& worker) { (*static_cast<const Body*>(context))(worker); };
  run_on_team(count, call, &body);
}

// Below this many bytes waking another thread costs more than it saves.
constexpr int64_t kBytesPerThread = 64 << 10;

inline int64_t threads_for(int64_t bytes, int64_t threads) {
  return std::clamp<int64_t>(bytes / kBytesPerThread, 1, std::max<int64_t>(threads, 1));
}

}  // namespace quire
