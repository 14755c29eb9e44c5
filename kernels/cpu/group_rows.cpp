// Rows of a quantised weight in float32, as its format defines them: see kernels/group_formats.py.

#include "group_chunk.h"
#include "threads.h"

namespace quire {
namespace {

// Some groups of an output.
void read_groups(float* to, const GroupFormat& format, const uint8_t* chunk, int64_t groups, int64_t output, int64_t inputs) {
  alignas(64) float values[kChunkGroups * kGroupInputs][kBlockOutputs];
  dequantise(values[0], format, chunk, groups);
  for (int64_t input = 0; input < inputs; input++) to[input] = values[input][output];
}

}  // namespace
}  // namespace quire

// False if there is no such row; nothing is read then.
extern "C" bool quire_group_rows(float* out, const uint8_t* weight, const quire::GroupFormat* format,
                                 const int64_t* rows, int64_t count, int64_t inputs, int64_t outputs, int64_t threads) {
  using namespace quire;
  if (!std::all_of(rows, rows + count, [&](int64_t row) { return row >= 0 && row < outputs; })) return false;
  constexpr int64_t kChunkInputs = kChunkGroups * kGroupInputs;
  const int64_t groups = groups_of(inputs), bytes = count * inputs * static_cast<int64_t>(sizeof(float));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    worker.for_shares(count, [&](int64_t row) {
      const uint8_t* chunk = weight + rows[row] / kBlockOutputs * format->block_bytes(groups);
      for (int64_t first = 0; first < inputs; first += kChunkInputs) {
        const int64_t taken = std::min(kChunkGroups, groups - first / kGroupInputs);
        read_groups(out + row * inputs + first, *format, chunk, taken, rows[row] % kBlockOutputs,
                    std::min(kChunkInputs, inputs - first));
        chunk += format->chunk_bytes(taken);
      }
    });
  });
  return true;
}
