// x W^T + b with a weight of 8-bit floats (e4m3), each multiplied by a scale.
//
// A weight [O, I] (kernels/float8_weight.py) is blocks of 16 outputs: the scales [S, 16] in float32, of `scale_inputs`
// inputs each, then the bytes in the order in which a packed weight has its elements (packed_product.h). Some blocks at a
// time become elements in a cache: value * scale in float32, rounded to their type. Those are multiplied as a packed weight
// is. So the bits of a result are those of a product with the same weight, dequantised and packed.

#include <algorithm>
#include <memory>
#include <new>

#include "float8_product.h"
#include "intrinsics.h"

namespace quire {
namespace {

// What is dequantised at a time by a thread, if a block is smaller.
constexpr int64_t kDecodedBytes = 256 << 10, kMostBlocks = 4;

// 16 values of e4m3, exact, divided by kUnit: the sign, 4 bits of exponent from 2^-7 on, and 3 bits of fraction. The
// smallest have no leading one. float16 has one bit of exponent more, which counts from 256 times as little.
#if defined(__F16C__) && !defined(QUIRE_INTRINSICS)

constexpr float kUnit = 256.0f;

inline Floats values_of(const uint8_t* from) {
  // Moved up by 7 bits, the sign is twice there: in its place, and in that of the bit of exponent.
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from)), 7);
  const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(halves);
#else
  const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  return load<Floats>(parts);
#endif
}

#else

constexpr float kUnit = 1.0f;

inline Floats values_of(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Words bits = __builtin_convertvector(load<Bytes>(from), Words);
  const Words size = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  const Ints is_small = size < 8u;
  const Words exponents = Words{} + (120u << 23), of_small = Words{} + (121u << 23);
  const Floats leading = is_small ? splat(0x1p-6f) : Floats{};
  const Floats value = (Floats)((size << 20) + (is_small ? of_small : exponents)) - leading;
  return (Floats)((Words)value | sign);
}

#endif

// Rounds to nearest even, as `store_lanes` does, but that the instruction makes the smallest numbers 0: so do products.
inline void store_element(float* to, Floats value) { store_lanes(to, value, kLanes); }
inline void store_element(Bf16* to, Floats value) {
#if defined(QUIRE_AVX512_BF16) && !defined(QUIRE_INTRINSICS)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &rounded, sizeof(rounded));
#else
  store_lanes(to, value, kLanes);
#endif
}

// Scales of 16 consecutive bytes: those of 16 outputs, or of 8 for their pairs of inputs.
template <typename T>
inline Floats scales_of(const float* scales, int half) {
  if constexpr (sizeof(T) == sizeof(float)) return load<Floats>(scales) * kUnit;
  Floats pairs;
  for (int i = 0; i < kLanes; i++) pairs[i] = scales[half * kLanes / 2 + i / 2];
  return pairs * kUnit;
}

// The elements of a block.
template <typename T>
void decode_block(T* to, const Float8Weight& weight, int64_t block) {
  constexpr int kStep = sizeof(float) / sizeof(T);  // inputs of an output that are next to each other
  const int64_t size = block_size_of<T>(weight.inputs), scale_floats = weight.scale_floats();
  const uint8_t* start = weight.data + block * (scale_floats * sizeof(float) + size);
  const uint8_t* values = start + scale_floats * sizeof(float);
  for (int64_t first = 0; first < scale_floats; first += kBlockOutputs) {
    const float* scales = reinterpret_cast<const float*>(start) + first;
    const int64_t begin = first * weight.scale_inputs;
    const int64_t end = first + kBlockOutputs < scale_floats ? begin + kBlockOutputs * weight.scale_inputs : size;
    Floats factors[kStep];
    for (int half = 0; half < kStep; half++) factors[half] = scales_of<T>(scales, half);
    for (int64_t i = begin; i < end; i += kStep * kLanes)
      for (int half = 0; half < kStep; half++)
        store_element(to + i + half * kLanes, values_of(values + i + half * kLanes) * factors[half]);
  }
}

template <typename T>
int64_t blocks_at_a_time(int64_t inputs) {
  return std::clamp<int64_t>(kDecodedBytes / (block_size_of<T>(inputs) * static_cast<int64_t>(sizeof(T))), 1, kMostBlocks);
}

}  // namespace

template <typename T>
int64_t float8_elements(int64_t inputs) {
  return blocks_at_a_time<T>(inputs) * block_size_of<T>(inputs);
}

template <typename T>
void multiply_float8(const Products<T>& all, const Float8Weight& weight, int64_t begin, int64_t end, T* decoded) {
  const int64_t size = block_size_of<T>(all.inputs), width = blocks_at_a_time<T>(all.inputs);
  for (int64_t block = begin; block < end; block += width) {
    const int64_t blocks = std::min(width, end - block), first = block * kBlockOutputs;
    for (int64_t b = 0; b < blocks; b++) decode_block(decoded + b * size, weight, block + b);
    for (int64_t row = 0; row < all.count; row += kCopiedRows) {
      const int64_t count = std::min(kCopiedRows, all.count - row);
      T* results[kCopiedRows];
      for (int64_t r = 0; r < count; r++) results[r] = all.results[row + r] + first;
      const Products<T> some{decoded, all.bias == nullptr ? nullptr : all.bias + first, all.rows + row, results, count,
                             all.inputs, std::min(blocks * kBlockOutputs, all.outputs - first)};
      some.multiply_blocks(0, blocks);
    }
  }
}

template <typename T>
void float8_linear(const LinearArguments& a, const Float8Weight& weight, T* decoded, const Worker& worker) {
  T* own = decoded + worker.index * float8_elements<T>(a.inputs);
  multiply_rows_of<T>(a, worker, [&](const Products<T>& all, int64_t begin, int64_t end) {
    multiply_float8(all, weight, begin, end, own);
  });
}

#define QUIRE_FLOAT8(T)                                                                                \
  template int64_t float8_elements<T>(int64_t);                                                        \
  template void multiply_float8<T>(const Products<T>&, const Float8Weight&, int64_t, int64_t, T*);     \
  template void float8_linear<T>(const LinearArguments&, const Float8Weight&, T*, const Worker&);
QUIRE_FLOAT8(Bf16)
QUIRE_FLOAT8(float)

namespace {

// Kept for the next product of this thread. It grows to what the widest weight needs.
struct Decoded {
  std::unique_ptr<char[]> memory;
  int64_t bytes = 0;

  // Null if there is not so much memory.
  void* reserve(int64_t wanted) {
    if (wanted > bytes) {
      bytes = 0;
      memory.reset(new (std::nothrow) char[wanted]);
      if (memory != nullptr) bytes = wanted;
    }
    return memory.get();
  }
};

// 0, or 1 if there is not enough memory.
template <typename T>
int run(const LinearArguments& a, int64_t scale_inputs, int64_t threads) {
  static thread_local Decoded kept;
  const int64_t count = threads_for(a.outputs * a.inputs, threads);
  const int64_t each = float8_elements<T>(a.inputs) * static_cast<int64_t>(sizeof(T));
  T* decoded = static_cast<T*>(kept.reserve(count * each));
  if (decoded == nullptr) return 1;
  const Float8Weight weight{static_cast<const uint8_t*>(a.weight), a.inputs, scale_inputs};
  run_together(count, [&](const Worker& worker) { float8_linear<T>(a, weight, decoded, worker); });
  return 0;
}

}  // namespace
}  // namespace quire

extern "C" int quire_float8_linear_bf16(const quire::LinearArguments* a, int64_t scale_inputs, int64_t threads) {
  return quire::run<quire::Bf16>(*a, scale_inputs, threads);
}
extern "C" int quire_float8_linear_f32(const quire::LinearArguments* a, int64_t scale_inputs, int64_t threads) {
  return quire::run<float>(*a, scale_inputs, threads);
}
extern "C" int64_t quire_float8_elements_bf16(int64_t inputs) { return quire::float8_elements<quire::Bf16>(inputs); }
extern "C" int64_t quire_float8_elements_f32(int64_t inputs) { return quire::float8_elements<float>(inputs); }
