// QK-norm, rotation and KV write, in one pass over the projections. kernels/rope_kv_write.py has the formula, and
// checks the arguments.

#include "rope_kv_write.h"

#include "kv_pages.h"
#include "rms_norm.h"

namespace quire {
namespace {

// Normalises one head (unless weight is null), rotates its first `rotary_dim` elements and copies the others. `scratch`
// has D elements.
template <typename T, typename W>
void rotate(T* to, const T* from, const W* weight, const float* cos_sin, int64_t width, int64_t rotary_dim, float eps,
          T* scratch) {
  if (weight != nullptr) {
    const float factor = inverse_rms(from, width, eps);
    for_parts(width, [&](int64_t d, int count) {
      store_lanes(scratch + d, normalised(from, weight, factor, d, count), count);
    });
    from = scratch;
  }
  const int64_t half = rotary_dim / 2;
  for_parts(half, [&](int64_t d, int count) {
    const Part first = load_lanes<Part>(from + d, count), second = load_lanes<Part>(from + half + d, count);
    const Part cos = load_lanes<Part>(cos_sin + d, count), sin = load_lanes<Part>(cos_sin + half + d, count);
    store_lanes(to + d, fused(first, cos, -second * sin), count);
    store_lanes(to + half + d, fused(second, cos, first * sin), count);
  });
  if (rotary_dim < width) std::memcpy(to + rotary_dim, from + rotary_dim, (width - rotary_dim) * sizeof(T));
}

template <typename T, typename W>
void write(const RopeArguments& a, const Worker& worker) {
  const float eps = static_cast<float>(a.eps);
  worker.for_shares(a.tokens, [&](int64_t token) {
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
    if (a.slots[token] < 0) return;  // a padding token
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const SlotOfHead<T> to{a.slots[token], part_of(a.slots[token], a.kv_heads, head), a.is_quantised != 0,
                             a.is_wide != 0};
      T key[kMaxHeadWidth];
      rotate_head(key, a.heads + head);
      to.write_key(a.k_pages, key, a.width);
      to.write_value(a.v_pages, from + (a.heads + a.kv_heads + head) * a.width, a.width);
    }
  });
}

}  // namespace

template <typename T>
void rope_kv_write(const RopeArguments& a, const Worker& worker) {
  if (a.wide_norm) write<T, float>(a, worker);
  else write<T, T>(a, worker);
}

template void rope_kv_write<Bf16>(const RopeArguments&, const Worker&);
template void rope_kv_write<float>(const RopeArguments&, const Worker&);

namespace {

template <typename T>
bool run(const RopeArguments& a, int64_t num_slots, int64_t threads) {
  if (!slots_exist(a.slots, a.tokens, num_slots)) return false;
  const int64_t bytes = a.tokens * (a.heads + 2 * a.kv_heads) * a.width * 2 * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { rope_kv_write<T>(a, worker); });
  return true;
}

}  // namespace
}  // namespace quire

// False if a slot is beyond the last page; nothing is written then.

QUIRE_EXPORT(bool, quire_rope_kv_write, (const quire::RopeArguments* a, int64_t num_slots, int64_t threads),
             quire::run, (*a, num_slots, threads))
