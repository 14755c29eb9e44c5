// Writes keys and values to their slots. kernels/cpu/kv_write.py checks the arguments.

#include "kv_pages.h"
#include "threads.h"

namespace quire {
namespace {

// Plain data, filled by kernels/cpu/kv_write.py: the fields must agree.
struct Arguments {
  const void *keys, *values;  // [T, K, D] and [T, K, V] contiguous
  const int64_t* slots;       // [T]
  void *k_pages, *v_pages;    // packed: see kv_pages.h; v_pages null: values are in the keys
  int64_t tokens, kv_heads, width, value_width, num_slots;
  int64_t is_quantised, is_wide;  // of pages: see SlotOfHead
};

template <typename T>
bool run(const Arguments& a, int64_t threads) {
  if (!slots_exist(a.slots, a.tokens, a.num_slots)) return false;
  const int64_t bytes = a.tokens * a.kv_heads * (a.width + a.value_width) * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    worker.for_shares(a.tokens, [&](int64_t token) {
      const int64_t slot = a.slots[token];
      if (slot < 0) return;  // a padding token
      for (int64_t head = 0; head < a.kv_heads; head++) {
        const int64_t from = token * a.kv_heads + head;
        const SlotOfHead<T> to{slot, part_of(slot, a.kv_heads, head), a.is_quantised != 0, a.is_wide != 0};
        to.write_key(a.k_pages, static_cast<const T*>(a.keys) + from * a.width, a.width);
        if (a.v_pages == nullptr) continue;
        to.write_value(a.v_pages, static_cast<const T*>(a.values) + from * a.value_width, a.value_width);
      }
    });
  });
  return true;
}

}  // namespace
}  // namespace quire

// False if a slot is beyond the last page; nothing is written then.

QUIRE_EXPORT(bool, quire_kv_write, (const quire::Arguments* a, int64_t threads), quire::run, (*a, threads))
