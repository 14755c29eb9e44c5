// Chooses the number of threads for an operation.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

// Below this many bytes waking another thread costs more than it saves.
constexpr int64_t kBytesPerThread = 64 << 10;

inline int threads_for(int64_t bytes, int64_t threads) {
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, std::max<int64_t>(threads, 1)));
}

}  // namespace quire
