// Uniform random numbers of token ids: the same as in workers/counter_rng.py.

#include <algorithm>
#include <cstdint>

namespace quire {
namespace {

constexpr int64_t kBlock = 64;

// The first word of Philox4x32-10 for the counters (id, 0, 0, 0) of a block, in a form that compilers vectorise.
inline void first_words(uint32_t* words, const int64_t* ids, int64_t count, uint64_t key) {
  uint32_t c0[kBlock], c1[kBlock], c2[kBlock], c3[kBlock];
  for (int64_t i = 0; i < kBlock; i++) {
    c0[i] = i < count ? static_cast<uint32_t>(ids[i]) : 0;
    c1[i] = c2[i] = c3[i] = 0;
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int64_t i = 0; i < kBlock; i++) {
      const uint64_t first = static_cast<uint64_t>(c0[i]) * 0xD2511F53u;
      const uint64_t second = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<uint32_t>(second >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(second);
      c2[i] = static_cast<uint32_t>(first >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(first);
    }
  std::copy(c0, c0 + count, words);
}

}  // namespace
}  // namespace quire

extern "C" void quire_philox_uniform(float* out, const int64_t* ids, int64_t count, uint64_t key) {
  using namespace quire;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t some = std::min(kBlock, count - start);
    uint32_t words[kBlock];
    first_words(words, ids + start, some, key);
    for (int64_t i = 0; i < some; i++) {
      // Negative numbers of int32 are mapped to the others; see workers/counter_rng.py.
      const int32_t folded = static_cast<int32_t>(std::min(words[i], ~words[i]));
      out[start + i] = static_cast<float>(folded) * 4.6566127342e-10f;
    }
  }
}
