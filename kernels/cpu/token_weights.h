// The weights of tokens, exp((logit - best) / temperature), in double precision: 1 for the most likely one.
//
// Sums run over the tokens in the order of their ids, in four lanes, whatever else is computed at the same time.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace quire {

// As wide as AVX2's registers: GCC makes single operations of comparisons of wider ones.
typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));
typedef float FourFloats __attribute__((vector_size(16)));
typedef float EightFloats __attribute__((vector_size(32)));

constexpr int kDoubleLanes = 4;
// Tokens that are looked at together: most blocks of a row have no likely token, and are skipped.
constexpr int64_t kBlockTokens = 64;
// All tokens below this log-weight together weigh less than the rounding error of a sum: 2^-64 each.
constexpr double kNegligible = -44.4;

constexpr int kEight = 8;

inline float largest_of(EightFloats x) {
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return std::max(x[0], x[1]);
}

inline Doubles splat_double(double x) { return x - Doubles{}; }

// a * b + c, rounded once.
inline Doubles fused(Doubles a, Doubles b, Doubles c) {
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  for (int i = 0; i < kDoubleLanes; i++) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#endif
}

// e^x for x <= 0, to about one unit in the last place; 1 for 0; 0 below -708, which includes -inf.
inline Doubles exponential(Doubles x) {
  const Doubles inside = x > -708.0 ? x : splat_double(-708.0);
  const Doubles magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer
  const Doubles shifted = fused(inside, splat_double(1.4426950408889634), magic);
  const Doubles whole = shifted - magic;
  Doubles r = fused(whole, splat_double(-0x1.62e42fefa39efp-1), inside);  // ln 2, in two parts
  r = fused(whole, splat_double(-0x1.abc9e3b39803fp-56), r);
  // Taylor series of e^r, |r| <= 0.347: the next term is below 2^-57.
  Doubles p = splat_double(1.0 / 6227020800.0);
  for (const double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0,
                                 2.0, 1.0, 1.0})
    p = fused(p, r, splat_double(1.0 / factorial));
  const Doubles scaled = (Doubles)((Longs)p + ((Longs)shifted << 52));
  return x >= -708.0 ? scaled : Doubles{};
}

inline double sum_of(Doubles x) {
  double sum = 0;
  for (int i = 0; i < kDoubleLanes; i++) sum += x[i];
  return sum;
}

// Up to four logits; the rest is -inf.
inline FourFloats load_four(const float* values, int64_t count) {
  FourFloats some = FourFloats{} - std::numeric_limits<float>::infinity();
  if (count >= kDoubleLanes) some = load<FourFloats>(values);
  else std::memcpy(&some, values, count * sizeof(float));
  return some;
}

// Calls body(first, count) for each block of tokens of which one is at least *bound, which body may raise.
template <typename Body>
inline void for_blocks(const float* values, int64_t count, const float* bound, Body body) {
  int64_t first = 0;
  for (; first + kBlockTokens <= count; first += kBlockTokens) {
    EightFloats most = load<EightFloats>(values + first);
    for (int i = kEight; i < kBlockTokens; i += kEight) most = larger(most, load<EightFloats>(values + first + i));
    if (largest_of(most) >= *bound) body(first, kBlockTokens);
  }
  if (first < count) body(first, count - first);
}

// How logits become weights.
struct Softmax {
  double best, temperature, scale;

  Softmax(double a_best, double a_temperature)
      : best(a_best),
        temperature(a_temperature),
        scale(std::min(1 / a_temperature, std::numeric_limits<double>::max())) {}

  double log_weight(float value) const { return (static_cast<double>(value) - best) / temperature; }

  // The logit with this log-weight, or a smaller one.
  float logit(double log_weight) const {
    const double value = best + log_weight * temperature;
    const double lowest = -static_cast<double>(std::numeric_limits<float>::max());
    return value <= lowest ? -std::numeric_limits<float>::max()
                           : std::nextafter(static_cast<float>(value), -std::numeric_limits<float>::infinity());
  }

  Doubles weights(FourFloats values) const {
    return exponential((__builtin_convertvector(values, Doubles) - best) * scale);
  }

  double weight(float value) const { return weights(FourFloats{} + value)[0]; }

  // The sums over the tokens from each of the bounds on, the lowest of which is the first. Negligible ones are left out.
  template <int N>
  void totals(const float* values, int64_t count, const float (&bounds)[N], double (&sums)[N]) const {
    Doubles lanes[N] = {};
    const Softmax own = *this;
    const float least = std::max(bounds[0], logit(kNegligible));
    for_blocks(values, count, &least, [&](int64_t first, int64_t some) {
      for (int64_t i = first; i < first + some; i += kDoubleLanes) {
        const FourFloats four = load_four(values + i, first + some - i);
        const Longs found = (Longs)own.weights(four);
        for (int n = 0; n < N; n++) lanes[n] += (Doubles)(found & __builtin_convertvector(four >= bounds[n], Longs));
      }
    });
    for (int n = 0; n < N; n++) sums[n] = sum_of(lanes[n]);
  }

  double total(const float* values, int64_t count) const {
    double sums[1];
    totals(values, count, {-std::numeric_limits<float>::max()}, sums);
    return sums[0];
  }
};

}  // namespace quire
