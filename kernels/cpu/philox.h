// Uniform random numbers of token ids: the same as in workers/counter_rng.py.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int64_t kPhiloxBlock = 64;

#if defined(__AVX2__)

// The first words of Philox4x32-10 for eight counters (id, 0, 0, 0): GCC makes twice as many instructions of plain code.
inline __m256i first_words(__m256i c0, uint64_t key) {
  __m256i c1 = _mm256_setzero_si256(), c2 = c1, c3 = c1;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  const auto multiply = [](__m256i a, uint32_t by, __m256i& high) {
    const __m256i factor = _mm256_set1_epi64x(by);
    const __m256i even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  };
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    __m256i high0, high2;
    const __m256i low0 = multiply(c0, 0xD2511F53u, high0), low2 = multiply(c2, 0xCD9E8D57u, high2);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high2, c1), _mm256_set1_epi32(static_cast<int>(k0)));
    c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(k1)));
    c1 = low2;
    c3 = low0;
  }
  return c0;
}

inline void first_words(uint32_t* words, uint64_t key) {
  for (int64_t i = 0; i < kPhiloxBlock; i += 8) {
    __m256i* eight = reinterpret_cast<__m256i*>(words + i);
    _mm256_storeu_si256(eight, first_words(_mm256_loadu_si256(eight), key));
  }
}

#else

// The same of kPhiloxBlock ids, in their place, in a form that compilers vectorise.
inline void first_words(uint32_t* c0, uint64_t key) {
  uint32_t c1[kPhiloxBlock] = {}, c2[kPhiloxBlock] = {}, c3[kPhiloxBlock] = {};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int64_t i = 0; i < kPhiloxBlock; i++) {
      const uint64_t first = static_cast<uint64_t>(c0[i]) * 0xD2511F53u;
      const uint64_t second = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<uint32_t>(second >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(second);
      c2[i] = static_cast<uint32_t>(first >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(first);
    }
}

#endif

// The numbers of up to kPhiloxBlock ids.
template <typename Id>
inline void uniform_block(float* out, const Id* ids, int64_t count, uint64_t key) {
  uint32_t words[kPhiloxBlock];
  for (int64_t i = 0; i < kPhiloxBlock; i++) words[i] = i < count ? static_cast<uint32_t>(ids[i]) : 0;
  first_words(words, key);
  for (int64_t i = 0; i < count; i++) {
    // Negative numbers of int32 are mapped to the others; see workers/counter_rng.py.
    const int32_t folded = static_cast<int32_t>(std::min(words[i], ~words[i]));
    out[i] = static_cast<float>(folded) * 4.6566127342e-10f;
  }
}

}  // namespace quire
