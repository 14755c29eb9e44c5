// Quantises rows as the reference code of GGUF does, into the layout of grouped_product.h, but for the scales.

#include <cmath>

#include "grouped_product.h"
#include "threads.h"

namespace quire {
namespace {

// The place of the largest of 32 numbers, the first of them if there are several. NaN is larger than all others.
inline int largest(const float (&x)[kGroupInputs]) {
  int found = 0;
  uint32_t most = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const uint32_t size = load<uint32_t>(x + i) & 0x7fffffffu;
    if (size > most) most = size, found = i;
  }
  return found;
}

// Writes the values of a group of an output, and returns their scale.
inline float quantise_group(uint8_t* values, const float (&x)[kGroupInputs], int64_t bits) {
  const float most = x[largest(x)];
  const float scale = bits == 8 ? std::fabs(most) / 127.0f : most / -8.0f;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  uint8_t rounded[kGroupInputs];
  // What is not finite is refused by the scale.
  const bool finite = std::isfinite(scale) && std::isfinite(inverse);
  for (int i = 0; i < kGroupInputs; i++) {
    const float scaled = finite ? x[i] * inverse : 0.0f;
    if (bits == 8) {
      const int32_t whole = static_cast<int32_t>(scaled);
      const float rest = scaled - static_cast<float>(whole);
      rounded[i] = static_cast<uint8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    } else {
      rounded[i] = static_cast<uint8_t>(std::min(static_cast<int32_t>(scaled + 8.5f), 15));
    }
  }
  for (int64_t i = 0; i < 4 * bits; i++)
    values[i / 4 * kStepBytes + i % 4] = bits == 8 ? rounded[i] : static_cast<uint8_t>(rounded[i] | rounded[i + 16] << 4);
  return scale;
}

// Rows [count, I] become those from `first` on of a weight, and their scales [count, G] are returned.
template <typename T>
void quantise(uint8_t* weight, float* scales, const T* rows, int64_t stride, int64_t first, int64_t count, int64_t inputs,
              int64_t bits, int64_t threads) {
  const int64_t groups = groups_of(inputs), bytes = count * inputs * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    worker.for_shares(count, [&](int64_t row) {
      const int64_t output = first + row;
      uint8_t* block = weight + output / kBlockOutputs * block_bytes(groups, bits) + scale_bytes(groups);
      for (int64_t group = 0; group < groups; group++) {
        float x[kGroupInputs] = {};
        for_lanes(std::min(kGroupInputs, inputs - group * kGroupInputs), [&](int64_t i, int lanes) {
          store_lanes(x + i, load_lanes(rows + row * stride + group * kGroupInputs + i, lanes), lanes);
        });
        uint8_t* values = block + group * bits * kStepBytes + output % kBlockOutputs * 4;
        scales[row * groups + group] = quantise_group(values, x, bits);
      }
    });
  });
}

}  // namespace
}  // namespace quire

extern "C" void quire_quantise_bf16(uint8_t* weight, float* scales, const quire::Bf16* rows, int64_t stride, int64_t first,
                                    int64_t count, int64_t inputs, int64_t bits, int64_t threads) {
  quire::quantise(weight, scales, rows, stride, first, count, inputs, bits, threads);
}
extern "C" void quire_quantise_f32(uint8_t* weight, float* scales, const float* rows, int64_t stride, int64_t first,
                                   int64_t count, int64_t inputs, int64_t bits, int64_t threads) {
  quire::quantise(weight, scales, rows, stride, first, count, inputs, bits, threads);
}
