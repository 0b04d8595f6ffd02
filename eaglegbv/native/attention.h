// Attention of rows over a paged pool of keys and values, one token a page.
//
// A row attends to what its request has committed and to the pending tokens it sees, in this order.
// The query heads that share a key head attend together, so that each key is widened once.
#pragma once

#include <cmath>
#include <vector>

#include "vectors.h"

namespace eaglegbv {

// One request's part of a forward, as `eaglegbv.attention.base.Segment`; pointers to its tensors.
struct Segment {
  const int64_t *tokens, *positions, *context, *pending, *pending_positions;
  const uint8_t* visible;  // [new, pending], or null for causal order
  int64_t visible_stride, num_new, num_context, num_pending;
};

struct Row {
  const Segment* segment;
  int64_t number;  // among the new tokens of its segment
  int64_t token, position, slot;
};

// The keys a row sees; a thread keeps those of its latest row, which all layers with the same
// window read again.
class VisibleKeys {
 public:
  std::vector<int64_t> slots;  // padded to whole vectors with the last of them
  int count = 0;

  // A key is seen if it is less than `window` positions back; 0 is no limit.
  void see(const Row& row, int64_t window) {
    if (row_ == &row && window_ == window) return;
    row_ = &row;
    window_ = window;
    const Segment& s = *row.segment;
    slots.clear();
    const int64_t first = window ? std::max<int64_t>(0, row.position - window + 1) : 0;
    if (first < s.num_context) slots.assign(s.context + first, s.context + s.num_context);
    const int64_t last = s.num_pending - s.num_new + row.number;  // in causal order
    for (int64_t k = 0; k < s.num_pending; k++) {
      const bool seen = s.visible ? s.visible[row.number * s.visible_stride + k] : k <= last;
      if (seen && s.pending_positions[k] >= first) slots.push_back(s.pending[k]);
    }
    count = slots.size();
    slots.resize((count + LANES - 1) / LANES * LANES, slots.back());
  }

 private:
  const Row* row_ = nullptr;
  int64_t window_ = 0;
};

// Keys or values of one layer and key head: the element of a slot is `slot * stride` behind.
template <class E>
struct Pages {
  const E* base;
  int64_t stride;
  const E* at(int64_t slot) const { return base + slot * stride; }
};

// Turns scores [keys, padded] into weights with sum 1.
inline void softmax(float* scores, int count, int padded) {
  for (int k = count; k < padded; k++) scores[k] = -INFINITY;
  Floats most = load(scores), total = {};
  for (int k = LANES; k < padded; k += LANES) most = larger(load(scores + k), most);
  const float top = largest(most);
  for (int k = 0; k < padded; k += LANES) {
    const Floats weight = exponential(load(scores + k) - top);
    store(scores + k, weight);
    total += weight;
  }
  const float scale = 1.f / sum(total);
  for (int k = 0; k < padded; k += LANES) store(scores + k, load(scores + k) * scale);
}

// VECTORS_AT_ONCE vectors of the values' weighted sums, keys in order.
template <int HEADS, int VECTORS_AT_ONCE, class E>
inline void weigh(const VisibleKeys& keys, const Pages<E>& values, int at, int width,
                  const float* weights, int padded, float* out) {
  Floats sums[HEADS][VECTORS_AT_ONCE] = {};
  for (int k = 0; k < keys.count; k++) {
    const E* value = values.at(keys.slots[k]) + at;
    for (int i = 0; i < VECTORS_AT_ONCE; i++) {
      const Floats part = load(value + i * LANES);
      for (int h = 0; h < HEADS; h++) sums[h][i] += part * weights[h * padded + k];
    }
  }
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < VECTORS_AT_ONCE; i++) store(out + h * width + at + i * LANES, sums[h][i]);
}

// HEADS query heads of width `width` (a multiple of 16) that read one key head.
// `scores` has room for HEADS times the padded keys.
template <int HEADS, class E>
void attend(const VisibleKeys& keys, const Pages<E>& k_pages, const Pages<E>& v_pages, int width,
            const float* q, float* scores, float* out) {
  const int padded = keys.slots.size();
  const float scale = 1.f / std::sqrt((float)width);
  for (int k = 0; k < padded; k += LANES) {
    Floats products[HEADS][LANES];
    for (int j = 0; j < LANES; j++) {
      const E* key = k_pages.at(keys.slots[k + j]);
      Floats product[HEADS] = {};
      for (int i = 0; i < width; i += LANES) {
        const Floats part = load(key + i);
        for (int h = 0; h < HEADS; h++) product[h] += load(q + h * width + i) * part;
      }
      for (int h = 0; h < HEADS; h++) products[h][j] = product[h];
    }
    for (int h = 0; h < HEADS; h++)
      store(scores + h * padded + k, sums<LANES>(products[h]) * scale);
  }
  for (int h = 0; h < HEADS; h++) softmax(scores + h * padded, keys.count, padded);
  constexpr int AT_ONCE = HEADS > 2 ? 4 : 8;
  int at = 0;
  for (; at + AT_ONCE * LANES <= width; at += AT_ONCE * LANES)
    weigh<HEADS, AT_ONCE>(keys, v_pages, at, width, scores, padded, out);
  for (; at < width; at += LANES) weigh<HEADS, 1>(keys, v_pages, at, width, scores, padded, out);
}

// Any number of heads, in fours and what is left.
template <class E>
void attend_all(int heads, const VisibleKeys& keys, const Pages<E>& k_pages,
                const Pages<E>& v_pages, int width, const float* q, std::vector<float>& scores,
                float* out) {
  scores.resize(4 * keys.slots.size());
  for (; heads >= 4; heads -= 4, q += 4 * width, out += 4 * width)
    attend<4>(keys, k_pages, v_pages, width, q, scores.data(), out);
  if (heads == 3) attend<3>(keys, k_pages, v_pages, width, q, scores.data(), out);
  if (heads == 2) attend<2>(keys, k_pages, v_pages, width, q, scores.data(), out);
  if (heads == 1) attend<1>(keys, k_pages, v_pages, width, q, scores.data(), out);
}

}  // namespace eaglegbv
