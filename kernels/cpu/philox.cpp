// Uniform random numbers of token ids, for Python.

#include "philox.h"

extern "C" void quire_philox_uniform(float* out, const int64_t* ids, int64_t count, uint64_t key) {
  using namespace quire;
  for (int64_t start = 0; start < count; start += kPhiloxBlock)
    uniform_block(out + start, ids + start, std::min(kPhiloxBlock, count - start), key);
}
