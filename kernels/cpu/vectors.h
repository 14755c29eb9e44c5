// Vectors of 16 floats in the portable notation of GCC and Clang: one register with AVX-512, two with AVX2.
//
// Only `fused` fuses a product and a sum. All other operations are rounded one by one (-ffp-contract=off), so that bits
// depend neither on the compiler nor on where a function is inlined.
#pragma once

#if !defined(__clang__) && __GNUC__ < 12
#error "needs GCC 12 or later, or Clang"
#endif

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
#include <immintrin.h>
#define QUIRE_PARTS
#endif

namespace quire {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// As many floats as a register has, for what computes each element by itself. With AVX2 GCC keeps variables of two
// registers in memory, and makes single operations of `fused` and of comparisons of them.
#if defined(QUIRE_PARTS)
typedef float Part __attribute__((vector_size(32)));
#else
using Part = Floats;
#endif

// Vectors of as many elements as V has.
template <typename V>
struct Like {
  typedef int32_t Ints __attribute__((vector_size(sizeof(V))));
  typedef uint32_t Words __attribute__((vector_size(sizeof(V))));
  typedef uint16_t Halves __attribute__((vector_size(sizeof(V) / 2)));
};

constexpr int kLanes = 16;
constexpr int kPartLanes = sizeof(Part) / sizeof(float);
using PartInts = Like<Part>::Ints;
// The largest head width of all kernels here, in elements.
constexpr int64_t kMaxHeadWidth = 576;
constexpr float kHidden = -__builtin_inff();

struct Bf16 {
  uint16_t bits;
};

// Defines NAME_bf16 and NAME_f32, which Python calls: FUNCTION<T> with the arguments, for elements of each type.
#define QUIRE_EXPORT(RESULT, NAME, PARAMETERS, FUNCTION, ARGUMENTS)                    \
  extern "C" RESULT NAME##_bf16 PARAMETERS { return FUNCTION<quire::Bf16> ARGUMENTS; } \
  extern "C" RESULT NAME##_f32 PARAMETERS { return FUNCTION<float> ARGUMENTS; }

template <typename V = Floats>
inline V splat(float x) {
  return x - V{};
}

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);  // of the loop GCC makes halves for some CPUs
#else
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

#if defined(QUIRE_PARTS)
inline Part fused(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
#endif

template <typename V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// The upper half of each float, rounded to nearest even as torch does, in the lower half of a word.
template <typename V>
inline typename Like<V>::Words to_bf16(V value) {
  using Words = typename Like<V>::Words;
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could turn a NaN into infinity. Without masks in registers GCC makes single operations of a comparison.
#if defined(__AVX512F__)
  return value == value ? rounded : Words{} + 0x7fc0u;
#else
  using Ints = typename Like<V>::Ints;
  const Words is_nan = (Words)((Ints{} + 0x7f800000 - (Ints)(bits & 0x7fffffffu)) >> 31);  // all bits or none
  return (rounded & ~is_nan) | (is_nan & 0x7fc0u);
#endif
}

typedef uint16_t Halves __attribute__((vector_size(32)));

// Up to as many elements as V has, in the order of memory; the rest is zero.
template <typename V = Floats>
inline V load_lanes(const Bf16* from, int count) {
  typename Like<V>::Halves raw{};
  if (count == sizeof(V) / sizeof(float)) std::memcpy(&raw, from, sizeof(raw));
  else std::memcpy(&raw, from, count * sizeof(Bf16));
  return (V)(__builtin_convertvector(raw, typename Like<V>::Words) << 16);
}

template <typename V = Floats>
inline V load_lanes(const float* from, int count) {
  V value{};
  if (count == sizeof(V) / sizeof(float)) std::memcpy(&value, from, sizeof(value));
  else std::memcpy(&value, from, count * sizeof(float));
  return value;
}

template <typename V>
inline void store_lanes(Bf16* to, V value, int count) {
  const auto raw = __builtin_convertvector(to_bf16(value), typename Like<V>::Halves);
  if (count == sizeof(V) / sizeof(float)) std::memcpy(to, &raw, sizeof(raw));
  else std::memcpy(to, &raw, count * sizeof(Bf16));
}

template <typename V>
inline void store_lanes(float* to, V value, int count) {
  if (count == sizeof(V) / sizeof(float)) std::memcpy(to, &value, sizeof(value));
  else std::memcpy(to, &value, count * sizeof(float));
}

// The value after it is stored: rounded to the type of the elements.
template <typename V>
inline V rounded(V value, const Bf16*) {
  return (V)(to_bf16(value) << 16);
}
template <typename V>
inline V rounded(V value, const float*) {
  return value;
}

// Calls body(first, count) for each group of up to kCount of `width` elements; `count` is a constant except in the last.
template <int kCount = kLanes, typename Body>
inline void for_lanes(int64_t width, Body body) {
  int64_t first = 0;
  for (; first + kCount <= width; first += kCount) body(first, kCount);
  if (first < width) body(first, static_cast<int>(width - first));
}

template <typename Body>
inline void for_parts(int64_t width, Body body) {
  for_lanes<kPartLanes>(width, body);
}

template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

template <typename V, typename Combine>
inline auto reduce(V x, Combine combine) {
  if constexpr (sizeof(V) == 64) {
    x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  } else {
    x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
  }
  return x[0];
}

// How many parts 16 elements have. The bits of what is made of these are those of one vector.
constexpr int kLaneParts = kLanes / kPartLanes;
template <typename Combine>
inline float reduce(const Part (&parts)[kLaneParts], Combine combine) {
  return reduce(kLaneParts == 1 ? parts[0] : combine(parts[0], parts[kLaneParts - 1]), combine);
}

// 0, 1, 2, ...
inline PartInts part_places() {
  alignas(64) static constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<PartInts>(kPlaces);
}

// 2^x for x <= 0, to about one unit in the last place; 0 below -126, which includes -inf.
template <typename V>
inline V power_of_two(V x) {
  using Ints = typename Like<V>::Ints;
  const V inside = larger(x, splat<V>(-126.0f));
  const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V whole = (inside + magic) - magic;
  const V r = inside - whole;  // exact, within [-0.5, 0.5]
  // Taylor series of 2^r: the next term is at most 2^-23.
  V p = splat<V>(1.5403530e-4f);
  for (const float next : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    p = fused(p, r, splat<V>(next));
  const Ints exponent = __builtin_convertvector(whole, Ints) << 23;
  const V scaled = (V)((Ints)p + exponent);
  return x >= -126.0f ? scaled : V{};
}

inline float power_of_two(float x) { return power_of_two(splat<Part>(x))[0]; }

}  // namespace quire
