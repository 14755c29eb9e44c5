// Vectors of 16 floats in GCC's portable notation: one register with AVX-512, two with AVX2.
//
// A `Pair` has 32 consecutive elements of memory as floats, in the order that is cheapest to produce. For sums of
// products the order does not matter; `store_pair` restores it.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace quire {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

constexpr int kLanes = 16;
constexpr int kPair = 2 * kLanes;
// The largest head width of all kernels here, in elements.
constexpr int64_t kMaxHeadWidth = 256;
constexpr float kHidden = -__builtin_inff();

struct Bf16 {
  uint16_t bits;
};

struct Pair {
  Floats first, second;
};

inline Floats splat(float x) { return x - Floats{}; }

template <typename V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// `count` elements from memory, 16 or 32; the rest is zero. No memory beyond them is read.
inline Pair load_pair(const Bf16* from, int count) {
  Words raw{};
  if (count == kPair) std::memcpy(&raw, from, 64);
  else std::memcpy(&raw, from, 32);
  // A bf16 is the upper half of a float: even elements are shifted up, odd ones are in place.
  return {(Floats)(raw << 16), (Floats)(raw & 0xffff0000u)};
}

inline Pair load_pair(const float* from, int count) {
  return {load<Floats>(from), count == kPair ? load<Floats>(from + kLanes) : Floats{}};
}

// The upper half of each float, rounded to nearest even as torch does, in the lower half of a word.
inline Words to_bf16(Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value == value ? rounded : Words{} + 0x7fc0u;  // rounding could turn a NaN into infinity
}

inline void store_pair(Bf16* to, Pair value, int count) {
  const Words raw = to_bf16(value.first) | (to_bf16(value.second) << 16);
  std::memcpy(to, &raw, count * sizeof(Bf16));
}

inline void store_pair(float* to, Pair value, int count) {
  std::memcpy(to, &value.first, sizeof(Floats));
  if (count == kPair) std::memcpy(to + kLanes, &value.second, sizeof(Floats));
}

typedef uint16_t Halves __attribute__((vector_size(32)));

// Up to 16 elements in the order of memory; the rest is zero.
inline Floats load_lanes(const Bf16* from, int count) {
  Halves raw{};
  if (count == kLanes) std::memcpy(&raw, from, sizeof(raw));
  else std::memcpy(&raw, from, count * sizeof(Bf16));
  return (Floats)(__builtin_convertvector(raw, Words) << 16);
}

inline Floats load_lanes(const float* from, int count) {
  Floats value{};
  if (count == kLanes) std::memcpy(&value, from, sizeof(value));
  else std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void store_lanes(Bf16* to, Floats value, int count) {
  const Halves raw = __builtin_convertvector(to_bf16(value), Halves);
  if (count == kLanes) std::memcpy(to, &raw, sizeof(raw));
  else std::memcpy(to, &raw, count * sizeof(Bf16));
}

inline void store_lanes(float* to, Floats value, int count) {
  if (count == kLanes) std::memcpy(to, &value, sizeof(value));
  else std::memcpy(to, &value, count * sizeof(float));
}

// The value after it is stored: rounded to the type of the elements.
inline Floats rounded(Floats value, const Bf16*) { return (Floats)(to_bf16(value) << 16); }
inline Floats rounded(Floats value, const float*) { return value; }

// Calls body(first, count) for each group of up to 16 of `width` elements; `count` is a constant except in the last.
template <typename Body>
inline void for_lanes(int64_t width, Body body) {
  int64_t first = 0;
  for (; first + kLanes <= width; first += kLanes) body(first, kLanes);
  if (first < width) body(first, static_cast<int>(width - first));
}

// sum + the products of 32 (or 16) elements, summed in 16 lanes. Products of bf16 are exact in float.
inline Floats dot(Floats sum, const float* a, const float* b, int count) {
  Pair x = load_pair(a, count), y = load_pair(b, count);
  return sum + x.first * y.first + x.second * y.second;
}

inline Floats dot(Floats sum, const Bf16* a, const Bf16* b, int count) {
#if defined(__AVX512BF16__)
  Words x{}, y{};
  if (count == kPair) std::memcpy(&x, a, 64), std::memcpy(&y, b, 64);
  else std::memcpy(&x, a, 32), std::memcpy(&y, b, 32);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
  Pair x = load_pair(a, count), y = load_pair(b, count);
  return sum + x.first * y.first + x.second * y.second;
#endif
}

// Lane i of the result is the sum over the lanes of sums[i]: four levels, each halving the vectors.
inline Floats sum_each(const Floats (&sums)[kLanes]) {
  Floats quads[4];
  for (int i = 0; i < 4; i++) {
    Floats pairs[2];
    for (int j = 0; j < 2; j++) {
      Floats a = sums[4 * i + 2 * j], b = sums[4 * i + 2 * j + 1];
      pairs[j] = __builtin_shuffle(a, b, Ints{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
                 __builtin_shuffle(a, b, Ints{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    }
    quads[i] = __builtin_shuffle(pairs[0], pairs[1], Ints{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
               __builtin_shuffle(pairs[0], pairs[1], Ints{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  }
  const Ints even{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const Ints odd{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
  Floats low = __builtin_shuffle(quads[0], quads[1], even) + __builtin_shuffle(quads[0], quads[1], odd);
  Floats high = __builtin_shuffle(quads[2], quads[3], even) + __builtin_shuffle(quads[2], quads[3], odd);
  return __builtin_shuffle(low, high, even) + __builtin_shuffle(low, high, odd);
}

// square[i][j] and square[j][i] change places.
inline void transpose(Words (&square)[kLanes]) {
#if defined(__AVX512F__)
  const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int bit = 1; bit < kLanes; bit *= 2) {
    const Ints own = (lanes & bit) == 0;
    const Ints even = own ? lanes : lanes + (kLanes - bit), odd = own ? lanes + bit : lanes + kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i & bit) continue;
      const Words a = square[i], b = square[i | bit];
      square[i] = __builtin_shuffle(a, b, even);
      square[i | bit] = __builtin_shuffle(a, b, odd);
    }
  }
#else
  uint32_t rows[kLanes][kLanes], columns[kLanes][kLanes];
  std::memcpy(rows, square, sizeof(rows));
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < kLanes; j++) columns[j][i] = rows[i][j];
  std::memcpy(square, columns, sizeof(columns));
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <typename Combine>
inline float reduce(Floats x, Combine combine) {
  x = combine(x, __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  x = combine(x, __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  x = combine(x, __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  x = combine(x, __builtin_shuffle(x, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return x[0];
}

// 2^x for x <= 0, to about one unit in the last place; 0 below -126, which includes -inf.
inline Floats power_of_two(Floats x) {
  Floats inside = larger(x, splat(-126.0f));
  Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats whole = (inside + magic) - magic;
  Floats r = inside - whole;  // exact, within [-0.5, 0.5]
  // Taylor series of 2^r: the next term is at most 2^-23.
  Floats p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  Ints exponent = __builtin_convertvector(whole, Ints) << 23;
  Floats scaled = (Floats)((Ints)p + exponent);
  return x >= -126.0f ? scaled : Floats{};
}

}  // namespace quire
