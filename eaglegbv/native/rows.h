// Rows of logits: what they are at a temperature, and their most likely tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace eaglegbv {

// Writes (x - largest) / temperature; returns the log of the sum of the exponentials of that, NaN
// if a number of the row is none.
inline double warp(const float* x, int count, float temperature, float* out) {
  const int whole = count / LANES * LANES;
  Floats most = Floats{} - INFINITY, total = {};
  for (int i = 0; i < whole; i += LANES) most = larger(load(x + i), most);
  const float top = std::accumulate(x + whole, x + count, largest(most), [](float a, float b) { return b > a ? b : a; });
  for (int i = 0; i < whole; i += LANES) {
    const Floats warped = (load(x + i) - top) / temperature;
    store(out + i, warped);
    total += exponential(warped);
  }
  double rest = sum(total);
  for (int i = whole; i < count; i++) {
    out[i] = (x[i] - top) / temperature;
    rest += std::exp(out[i]);
  }
  return std::log(rest);
}

// Bits of a number that sort as the numbers do, NaN above all.
inline uint32_t sortable(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  if (x != x) return ~0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The places of the `width` largest of a row, in order; of equal ones the first.
inline void likeliest(const float* x, int count, int width, int64_t* places) {
  std::vector<uint32_t> keys(count), order;
  std::transform(x, x + count, keys.begin(), sortable);
  order = keys;
  std::nth_element(order.begin(), order.begin() + width - 1, order.end(), std::greater<>());
  const uint32_t edge = order[width - 1];
  int ties = std::count(order.begin(), order.begin() + width, edge);
  for (int i = 0; i < count; i++)
    if (keys[i] > edge || (keys[i] == edge && ties-- > 0)) *places++ = i;
}

// Their probabilities among themselves at a temperature.
inline void probabilities(const float* x, const int64_t* places, int width, float temperature,
                          double* probs) {
  float top = x[places[0]];
  for (int i = 0; i < width; i++) top = std::max(top, x[places[i]]);
  double total = 0;
  for (int i = 0; i < width; i++)
    total += probs[i] = std::exp((double)((x[places[i]] - top) / temperature));
  for (int i = 0; i < width; i++) probs[i] /= total;
}

}  // namespace eaglegbv
