// Quantises rows to the formats of kernels/group_formats.py. kernels/quantisers.py has the same in torch, and says how
// scales are chosen. All operations are rounded one by one, so that both have the same bits.

#include <cmath>

#include "group_format.h"
#include "threads.h"

namespace quire {
namespace {

// The scales that are tried for a group with a minimum, and for half a group without one.
constexpr int kTriesWithMinimum = 21, kTriesOfHalf = 19;
constexpr float kTryStep = 0.1f, kNotFinite = __builtin_nanf("");
static_assert(kGroupInputs == 2 * kLanes);

// A group, and a scale with a minimum for all of it or for a half.
struct Group {
  Floats halves[2];
};
struct Factors {
  float scale, minimum;
};

inline float sum(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}
inline Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// Rounded down to whole numbers, and from 0 to `most`. NaN becomes 0.
inline Ints whole(Floats x, float most) {
  x = x > 0.0f ? x : Floats{};
  return __builtin_convertvector(x < splat(most) ? x : splat(most), Ints);
}
inline Floats whole_floats(Floats x, float most) { return __builtin_convertvector(whole(x, most), Floats); }

// For values from 0 to `levels`.
inline Factors search_with_minimum(const Group& group, float levels) {
  const Floats x0 = group.halves[0], x1 = group.halves[1];
  const float squares = sum(x0 * x0 + x1 * x1);
  if (!std::isfinite(squares)) return {kNotFinite, 0.0f};
  const float low = std::min(0.0f, -reduce(larger(-x0, -x1), larger<Floats>));
  const float range = reduce(larger(x0, x1), larger<Floats>) - low;
  Factors found{range / levels, low};
  if (!(range > 0.0f)) return found;
  // Large values count more.
  const Floats mean = splat(std::sqrt(squares / static_cast<float>(kGroupInputs)));
  const Floats w0 = mean + absolute(x0), w1 = mean + absolute(x1), wx0 = w0 * x0, wx1 = w1 * x1;
  const float sum_w = sum(w0 + w1), sum_x = sum(wx0 + wx1);
  float most = -1.0f;
  for (int i = 0; i < kTriesWithMinimum; i++) {
    const Floats inverse = splat((levels - 1.0f + kTryStep * static_cast<float>(i)) / range);
    const Floats l0 = whole_floats((x0 - low) * inverse + 0.5f, levels);
    const Floats l1 = whole_floats((x1 - low) * inverse + 0.5f, levels);
    const Floats wl0 = w0 * l0, wl1 = w1 * l1;
    const float sum_l = sum(wl0 + wl1), sum_ll = sum(wl0 * l0 + wl1 * l1), sum_xl = sum(wx0 * l0 + wx1 * l1);
    // The scale and the minimum with the least squares.
    const float determinant = sum_w * sum_ll - sum_l * sum_l;
    Factors best{(sum_w * sum_xl - sum_x * sum_l) / determinant, (sum_ll * sum_x - sum_l * sum_xl) / determinant};
    if (best.minimum > 0.0f) best = {sum_xl / sum_ll, 0.0f};
    // What the squares become less by.
    const float gain = best.scale * sum_xl + best.minimum * sum_x;
    if (determinant > 0.0f && best.scale > 0.0f && gain > most) most = gain, found = best;
  }
  return found;
}

// For values from -levels to levels - 1. The scale may be negative.
inline Factors search_half(Floats x, float levels) {
  if (!std::isfinite(sum(x * x))) return {kNotFinite, 0.0f};
  float largest = x[0];
  for (int i = 1; i < kLanes; i++)
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  if (largest == 0.0f) return {0.0f, 0.0f};
  const Floats y = x / splat(largest), w = y * y, wy = w * y;
  float scale = -1.0f / levels, most = 0.0f;
  for (int i = 0; i < kTriesOfHalf; i++) {
    const Floats inverse = splat(-(levels + kTryStep * static_cast<float>(i - kTriesOfHalf / 2)));
    const Floats l = whole_floats(y * inverse + (levels + 0.5f), 2.0f * levels - 1.0f) - levels;
    const float sum_yl = sum(wy * l), sum_ll = sum(w * l * l), best = sum_yl / sum_ll, gain = best * sum_yl;
    if (sum_ll > 0.0f && gain > most) most = gain, scale = best;
  }
  return {largest * scale, 0.0f};
}

// The place of the largest of 32 numbers, the first of them if there are several. NaN is larger than all others.
inline int place_of_largest(const float (&x)[kGroupInputs]) {
  int found = 0;
  uint32_t most = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const uint32_t size = load<uint32_t>(x + i) & 0x7fffffffu;
    if (size > most) most = size, found = i;
  }
  return found;
}

// Quantises a group to "q8_0", "q5_0" or "q4_0", and returns its scale.
inline float quantise_group(uint8_t* values, const Group& group, int64_t bits) {
  float x[kGroupInputs];
  std::memcpy(x, &group, sizeof(x));
  const int middle = 1 << (bits - 1);
  const float most = x[place_of_largest(x)];
  const float scale = bits == 8 ? std::fabs(most) / 127.0f : most / static_cast<float>(-middle);
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  // What is not finite is refused by the scale.
  const bool finite = std::isfinite(scale) && std::isfinite(inverse);
  for (int i = 0; i < kGroupInputs; i++) {
    const float scaled = finite ? x[i] * inverse : 0.0f;
    if (bits == 8) {
      const int32_t whole = static_cast<int32_t>(scaled);
      const float rest = scaled - static_cast<float>(whole);
      values[i] = static_cast<uint8_t>(128 + whole + (rest >= 0.5f) - (rest <= -0.5f));
    } else {
      const int32_t up = static_cast<int32_t>(scaled + (static_cast<float>(middle) + 0.5f));
      values[i] = static_cast<uint8_t>(std::min(up, 2 * middle - 1));
    }
  }
  return scale;
}

// The values of half a group, of which the scale is known.
inline void round_half(uint8_t* values, Floats x, Factors factors, const GroupFormat& format) {
  const float inverse = factors.scale == 0.0f ? 0.0f : 1.0f / factors.scale;
  const Floats scaled = (x - factors.minimum) * inverse + (static_cast<float>(format.offset) + 0.5f);
  const Ints rounded = whole(scaled, static_cast<float>((1 << format.bits) - 1));
  for (int i = 0; i < kLanes; i++) values[i] = static_cast<uint8_t>(rounded[i]);
}

// Calls body(group, place) for the groups of rows [count, I], of which `place` counts all.
template <typename T, typename Body>
void for_groups(const T* rows, int64_t stride, int64_t count, int64_t inputs, int64_t threads, Body body) {
  const int64_t groups = groups_of(inputs), bytes = count * inputs * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    worker.for_shares(count, [&](int64_t row) {
      for (int64_t index = 0; index < groups; index++) {
        Group group{};
        for_lanes(std::min(kGroupInputs, inputs - index * kGroupInputs), [&](int64_t i, int lanes) {
          group.halves[i / kLanes] = load_lanes(rows + row * stride + index * kGroupInputs + i, lanes);
        });
        body(group, row * groups + index);
      }
    });
  });
}

template <typename T>
void quantise(uint8_t* values, float* scales, const GroupFormat& format, const T* rows, int64_t stride, int64_t count,
              int64_t inputs, int64_t threads) {
  for_groups(rows, stride, count, inputs, threads, [&](const Group& group, int64_t place) {
    scales[place] = quantise_group(values + place * kGroupInputs, group, format.bits);
  });
}

// `minima` is null for a format that has none; its halves have scales then.
template <typename T>
void search_factors(float* scales, float* minima, const GroupFormat& format, const T* rows, int64_t stride,
                    int64_t count, int64_t inputs, int64_t threads) {
  for_groups(rows, stride, count, inputs, threads, [&](const Group& group, int64_t place) {
    if (minima != nullptr) {
      const Factors found = search_with_minimum(group, static_cast<float>((1 << format.bits) - 1));
      scales[place] = found.scale, minima[place] = found.minimum;
      return;
    }
    for (int half = 0; half < 2; half++)
      scales[place * 2 + half] = search_half(group.halves[half], static_cast<float>(format.offset)).scale;
  });
}

template <typename T>
void round_values(uint8_t* values, const float* scales, const float* minima, const GroupFormat& format, const T* rows,
                  int64_t stride, int64_t count, int64_t inputs, int64_t threads) {
  for_groups(rows, stride, count, inputs, threads, [&](const Group& group, int64_t place) {
    for (int half = 0; half < 2; half++) {
      const int64_t factor = format.halves() == 2 ? place * 2 + half : place;
      const Factors factors{scales[factor], minima == nullptr ? 0.0f : minima[factor]};
      round_half(values + place * kGroupInputs + half * kLanes, group.halves[half], factors, format);
    }
  });
}

}  // namespace
}  // namespace quire

#define QUIRE_QUANTISE(suffix, T)                                                                                      \
  extern "C" void quire_quantise_##suffix(uint8_t* values, float* scales, const quire::GroupFormat* format,            \
                                          const T* rows, int64_t stride, int64_t count, int64_t inputs,                \
                                          int64_t threads) {                                                           \
    quire::quantise(values, scales, *format, rows, stride, count, inputs, threads);                                    \
  }                                                                                                                    \
  extern "C" void quire_search_factors_##suffix(float* scales, float* minima, const quire::GroupFormat* format,        \
                                                const T* rows, int64_t stride, int64_t count, int64_t inputs,          \
                                                int64_t threads) {                                                     \
    quire::search_factors(scales, minima, *format, rows, stride, count, inputs, threads);                              \
  }                                                                                                                    \
  extern "C" void quire_round_values_##suffix(uint8_t* values, const float* scales, const float* minima,               \
                                              const quire::GroupFormat* format, const T* rows, int64_t stride,         \
                                              int64_t count, int64_t inputs, int64_t threads) {                        \
    quire::round_values(values, scales, minima, *format, rows, stride, count, inputs, threads);                        \
  }

QUIRE_QUANTISE(bf16, quire::Bf16)
QUIRE_QUANTISE(f32, float)
