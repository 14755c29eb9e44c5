// Writes the values of quantised weights in the layout of group_format.h: those of files, and those of rows, which are
// quantised as the reference code of GGUF does it. Scales are written by kernels/group_layout.py.

#include <cmath>

#include "group_format.h"
#include "threads.h"

namespace quire {
namespace {

// The bits of the planes of a value, the lowest first.
struct Planes {
  int bits[2];

  explicit Planes(int64_t all)
      : bits{all == 8 ? 8 : all >= 4 ? 4 : 2, static_cast<int>(all == 8 ? 0 : all - (all >= 4 ? 4 : 2))} {}
};

// A weight that is written.
struct Target {
  uint8_t* weight;
  const GroupFormat& format;
  int64_t groups, block_bytes = format.block_bytes(groups), chunk_bytes = format.chunk_bytes(kChunkGroups);
  Planes planes{format.bits};

  // Writes the values of a group of an output.
  void write(int64_t output, int64_t group, const uint8_t (&values)[kGroupInputs]) const {
    const int64_t chunk_group = group / kChunkGroups * kChunkGroups;
    uint8_t* to = weight + output / kBlockOutputs * block_bytes + group / kChunkGroups * chunk_bytes +
                  format.values_at(std::min(kChunkGroups, groups - chunk_group)) +
                  (group - chunk_group) * format.bits * kStepBytes + output % kBlockOutputs * 4;
    int below = 0;
    for (const int bits : planes.bits) {
      for (int step = 0; step < bits; step++, to += kStepBytes)
        for (int i = 0; i < 4; i++) {
          int byte = 0;
          for (int shift = 0; shift < 8 / bits; shift++)
            byte |= (values[(shift * bits + step) * 4 + i] >> below & ((1 << bits) - 1)) << bits * shift;
          to[i] = static_cast<uint8_t>(byte);
        }
      below += bits;
    }
  }
};

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

// Quantises a group to "q8_0" or "q4_0", and returns its scale.
inline float quantise_group(uint8_t (&values)[kGroupInputs], const float (&x)[kGroupInputs], int64_t bits) {
  const float most = x[largest(x)];
  const float scale = bits == 8 ? std::fabs(most) / 127.0f : most / -8.0f;
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
      values[i] = static_cast<uint8_t>(std::min(static_cast<int32_t>(scaled + 8.5f), 15));
    }
  }
  return scale;
}

// Rows [count, I] become those from `first` on of a weight, and their scales [count, G] are returned.
template <typename T>
void quantise(const Target& target, float* scales, const T* rows, int64_t stride, int64_t first, int64_t count,
              int64_t inputs, int64_t threads) {
  const int64_t bytes = count * inputs * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    worker.for_shares(count, [&](int64_t row) {
      for (int64_t group = 0; group < target.groups; group++) {
        float x[kGroupInputs] = {};
        for_lanes(std::min(kGroupInputs, inputs - group * kGroupInputs), [&](int64_t i, int lanes) {
          store_lanes(x + i, load_lanes(rows + row * stride + group * kGroupInputs + i, lanes), lanes);
        });
        uint8_t values[kGroupInputs];
        scales[row * target.groups + group] = quantise_group(values, x, target.format.bits);
        target.write(first + row, group, values);
      }
    });
  });
}

// Values [count, G, 32] become those of the rows from `first` on.
void write_values(const Target& target, const uint8_t* values, int64_t first, int64_t count, int64_t threads) {
  const int64_t row_bytes = target.groups * kGroupInputs;
  run_together(threads_for(count * row_bytes, threads), [&](const Worker& worker) {
    worker.for_shares(count, [&](int64_t row) {
      for (int64_t group = 0; group < target.groups; group++) {
        uint8_t of_group[kGroupInputs];
        std::memcpy(of_group, values + row * row_bytes + group * kGroupInputs, sizeof(of_group));
        target.write(first + row, group, of_group);
      }
    });
  });
}

}  // namespace
}  // namespace quire

extern "C" void quire_quantise_bf16(uint8_t* weight, const quire::GroupFormat* format, float* scales,
                                    const quire::Bf16* rows, int64_t stride, int64_t first, int64_t count,
                                    int64_t inputs, int64_t threads) {
  quire::quantise({weight, *format, quire::groups_of(inputs)}, scales, rows, stride, first, count, inputs, threads);
}
extern "C" void quire_quantise_f32(uint8_t* weight, const quire::GroupFormat* format, float* scales, const float* rows,
                                   int64_t stride, int64_t first, int64_t count, int64_t inputs, int64_t threads) {
  quire::quantise({weight, *format, quire::groups_of(inputs)}, scales, rows, stride, first, count, inputs, threads);
}
extern "C" void quire_write_values(uint8_t* weight, const quire::GroupFormat* format, const uint8_t* values,
                                   int64_t first, int64_t count, int64_t groups, int64_t threads) {
  quire::write_values({weight, *format, groups}, values, first, count, threads);
}
