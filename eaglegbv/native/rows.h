// Rows of logits: their candidates, and what normalises them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace eaglegbv {

// Bits of a number that sort as the numbers do, NaN above all.
inline uint32_t sortable(float x) {
  if (x != x) return 0xffffffffu;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What a vocabulary is too long for a whole sort of.
struct Candidate {
  float logit;
  int64_t place;
};

// The `width` largest of a row's logits, the first of equal ones, in the order of their places.
inline void likeliest(const float* logits, int vocab, int width, std::vector<uint32_t>& keys,
                      std::vector<Candidate>& kept) {
  keys.resize(vocab);
  for (int i = 0; i < vocab; i++) keys[i] = sortable(logits[i]);
  std::vector<uint32_t> order(keys);
  std::nth_element(order.begin(), order.begin() + width - 1, order.end(), std::greater<>());
  const uint32_t edge = order[width - 1];
  const int above = std::count_if(order.begin(), order.begin() + width, [&](uint32_t key) { return key > edge; });
  int ties = width - above;
  kept.clear();
  for (int i = 0; i < vocab; i++)
    if (keys[i] > edge || (keys[i] == edge && ties-- > 0)) kept.push_back({logits[i], i});
}

// log(sum(exp(x - top))) + top of a row, its vectors added in order.
inline double log_sum(const float* x, int count, float top) {
  Floats total = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) total += exponential(load(x + i) - top);
  double rest = sum(total);
  for (; i < count; i++) rest += std::exp(x[i] - top);
  return std::log(rest) + top;
}

// The largest of a row; NaN if any is NaN.
inline float top_of(const float* x, int count) {
  Floats most = Floats{} + x[0], all = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    most = larger(load(x + i), most);
    all += load(x + i) * 0.f;  // 0, or NaN of what is not finite
  }
  float top = largest(most);
  for (; i < count; i++) top = x[i] > top ? x[i] : top;
  return top;
}

}  // namespace eaglegbv
