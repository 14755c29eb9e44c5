// The experts of all tokens. kernels/experts.py checks the arguments.

#include "routing.h"

#include <atomic>

#include "threads.h"

namespace quire {
namespace {

// Plain data, filled by kernels/cpu/routing.py: the fields must agree.
struct Arguments {
  const void* logits;    // [T, E] contiguous
  const int64_t* given;  // [T, k] contiguous, or null; see `Router`
  int64_t* ids;          // [T, k]
  float* weights;        // [T, k]
  int64_t tokens, threads;
  RoutingRule rule;
};

template <typename T>
bool run(const Arguments& a) {
  std::atomic<bool> found{true};
  const int64_t bytes = a.tokens * a.rule.experts * static_cast<int64_t>(sizeof(double));
  run_together(threads_for(bytes, a.threads), [&](const Worker& worker) {
    Router router(a.rule);
    worker.for_shares(a.tokens, [&](int64_t token) {
      const int64_t first = token * a.rule.choices;
      const int64_t* given = a.given == nullptr ? nullptr : a.given + first;
      const T* logits = static_cast<const T*>(a.logits) + token * a.rule.experts;
      if (!router.route(logits, given, a.ids + first, a.weights + first)) found = false;
    });
  });
  return found;
}

}  // namespace
}  // namespace quire

// False if a given expert does not exist; results have no meaning then.
QUIRE_EXPORT(bool, quire_route, (const quire::Arguments* a), quire::run, (*a))
