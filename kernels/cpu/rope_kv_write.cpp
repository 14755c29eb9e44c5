// QK-norm, rotation and KV write, in one pass over the projections. kernels/rope_kv_write.py has the formula, and
// checks the arguments.

#include "rms_norm.h"
#include "threads.h"

namespace quire {
namespace {

// Plain data, filled by kernels/cpu/rope_kv_write.py: the fields must agree. Strides are in elements.
struct Arguments {
  void* query;            // [T, H, D] contiguous
  const void* qkv;        // [T, (H + 2 * K) * D]
  const void* qk_norm;    // [H + K, D] contiguous, or null
  const float* cos_sin;   // [T, R]; null where R is 0
  const int64_t* slots;   // [T]
  void *k_pages, *v_pages;  // [P * S, K, D] contiguous
  int64_t tokens, heads, kv_heads, width, rotary_dim, num_slots, qkv_stride, cos_sin_stride, threads;
  double eps;
};

// Normalises one head (unless weight is null), rotates its first `rotary_dim` elements and copies the others. `scratch`
// has D elements.
template <typename T, typename W>
void rotate(T* to, const T* from, const W* weight, const float* cos_sin, int64_t width, int64_t rotary_dim, float eps,
          T* scratch) {
  if (weight != nullptr) {
    const float factor = inverse_rms(from, width, eps);
    for_lanes(width, [&](int64_t d, int count) {
      store_lanes(scratch + d, normalised(from, weight, factor, d, count), count);
    });
    from = scratch;
  }
  const int64_t half = rotary_dim / 2;
  for_lanes(half, [&](int64_t d, int count) {
    const Floats first = load_lanes(from + d, count), second = load_lanes(from + half + d, count);
    const Floats cos = load_lanes(cos_sin + d, count), sin = load_lanes(cos_sin + half + d, count);
    store_lanes(to + d, fused(first, cos, -second * sin), count);
    store_lanes(to + half + d, fused(second, cos, first * sin), count);
  });
  if (rotary_dim < width) std::memcpy(to + rotary_dim, from + rotary_dim, (width - rotary_dim) * sizeof(T));
}

// False if a slot is beyond the last page; nothing is written then.
template <typename T, typename W>
bool rope_kv_write(const Arguments& a) {
  if (std::any_of(a.slots, a.slots + a.tokens, [&](int64_t slot) { return slot >= a.num_slots; })) return false;
  const float eps = static_cast<float>(a.eps);
  const int64_t all_heads = a.heads + 2 * a.kv_heads, bytes = a.tokens * all_heads * a.width * 2 * sizeof(T);
#pragma omp parallel for num_threads(threads_for(bytes, a.threads))
  for (int64_t token = 0; token < a.tokens; token++) {
    T scratch[kMaxHeadWidth];
    const T* from = static_cast<const T*>(a.qkv) + token * a.qkv_stride;
    const W* norm = static_cast<const W*>(a.qk_norm);
    const float* cos_sin = a.cos_sin + token * a.cos_sin_stride;
    T* query = static_cast<T*>(a.query) + token * a.heads * a.width;
    auto rotate_head = [&](T* to, int64_t head) {
      const W* weight = norm == nullptr ? nullptr : norm + head * a.width;
      rotate(to, from + head * a.width, weight, cos_sin, a.width, a.rotary_dim, eps, scratch);
    };
    for (int64_t head = 0; head < a.heads; head++) rotate_head(query + head * a.width, head);
    if (a.slots[token] < 0) continue;  // a padding token
    const int64_t at = a.slots[token] * a.kv_heads * a.width;
    T *keys = static_cast<T*>(a.k_pages) + at, *values = static_cast<T*>(a.v_pages) + at;
    for (int64_t head = 0; head < a.kv_heads; head++) rotate_head(keys + head * a.width, a.heads + head);
    std::memcpy(values, from + (a.heads + a.kv_heads) * a.width, a.kv_heads * a.width * sizeof(T));
  }
  return true;
}

}  // namespace
}  // namespace quire

extern "C" bool quire_rope_kv_write_bf16(const void* a) {
  return quire::rope_kv_write<quire::Bf16, quire::Bf16>(*static_cast<const quire::Arguments*>(a));
}
extern "C" bool quire_rope_kv_write_bf16_f32(const void* a) {
  return quire::rope_kv_write<quire::Bf16, float>(*static_cast<const quire::Arguments*>(a));
}
extern "C" bool quire_rope_kv_write_f32(const void* a) {
  return quire::rope_kv_write<float, float>(*static_cast<const quire::Arguments*>(a));
}
