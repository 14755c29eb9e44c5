// Writes the values of quantised weights in the layout of group_format.h. Scales are written by kernels/group_layout.py.

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

extern "C" void quire_write_values(uint8_t* weight, const quire::GroupFormat* format, const uint8_t* values,
                                   int64_t first, int64_t count, int64_t groups, int64_t threads) {
  quire::write_values({weight, *format, groups}, values, first, count, threads);
}
