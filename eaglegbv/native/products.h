// Products of rows with a matrix of weights.
//
// Weights [outputs, inputs] are packed in panels of 16 outputs: [outputs / 16][inputs][16], those of
// bfloat16 in pairs of inputs, [outputs / 16][inputs / 2][16][2], as AVX512-BF16 multiplies them.
// Elsewhere a pair is widened by a shift and a mask and multiplied in float32. Every number has one
// accumulator, which takes the inputs in order: tiles of any shape give the same bits. Panels are
// the outer loop and rows the inner one, so weights are read from memory once, whatever the rows.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace eaglegbv {

#if defined(__AVX512BF16__) || defined(EAGLEGBV_PAIRED)  // the second for tests on other machines
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

constexpr int PANEL = 16, VECTORS = PANEL / LANES;  // outputs and vectors of a panel
// Rows of a tile: its sums share the registers with the weights of a panel and one input.
constexpr int MOST_ROWS = std::min((REGISTERS - 1) / VECTORS - 1, 13);
constexpr int BLOCK = 8 * PANEL;  // outputs whose weights stay in a core's cache for all rows
constexpr size_t HUGE_PAGE = 2 << 20;

class Matrix {
 public:
  const int outputs, inputs;
  const bool halves;  // whether weights are bfloat16
  std::vector<float> bias;

  // `halves` narrows weights of float32, which must be exact in bfloat16.
  template <class E>
  Matrix(const E* weights, int outputs, int inputs, bool halves, const float* bias)
      : outputs(outputs), inputs(inputs), halves(halves) {
    if (bias) this->bias.assign(bias, bias + outputs);
    const size_t numbers = (size_t)(outputs + PANEL - 1) / PANEL * PANEL * inputs;
    const size_t bytes = numbers * (halves ? sizeof(bfloat16) : sizeof(float));
    const size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    // Small matrices are not worth a page of 2 MiB each.
    memory_ = bytes < HUGE_PAGE / 2 ? aligned_alloc(64, bytes) : aligned_alloc(HUGE_PAGE, whole);
    if (!memory_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (bytes >= HUGE_PAGE / 2) madvise(memory_, whole, MADV_HUGEPAGE);
#endif
    if (halves) pack(weights, static_cast<bfloat16*>(memory_), 2);
    else if constexpr (sizeof(E) == sizeof(float)) pack(weights, static_cast<float*>(memory_), 1);
  }
  Matrix(const Matrix&) = delete;
  ~Matrix() { free(memory_); }

  template <class W>
  const W* panel(int output) const {
    return static_cast<const W*>(memory_) + (size_t)output * inputs;
  }

 private:
  template <class E, class W>
  void pack(const E* weights, W* packed, int group) {
#pragma omp parallel for
    for (int first = 0; first < outputs; first += PANEL)
      for (int k = 0; k < inputs; k++)
        for (int i = 0; i < PANEL; i++) {
          W* place = packed + (size_t)first * inputs + (k / group * PANEL + i) * group + k % group;
          if (first + i < outputs) assign(*place, weights[(size_t)(first + i) * inputs + k]);
          else *place = W{};
        }
  }
  void* memory_;
};


// sum += weights * x, of one input, or of a pair of inputs.
inline void add_product(Floats& sum, Floats weights, const float* x) { sum += weights * *x; }

inline void add_product(Floats& sum, Floats weights, const bfloat16* x) {
  uint32_t pair;
  memcpy(&pair, x, sizeof(pair));
#if defined(__AVX512BF16__)
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
#else
  const Bits both = Bits{} + pair, packed = (Bits)weights;
  sum += (Floats)(packed & 0xffff0000u) * (Floats)(both & 0xffff0000u);
  sum += (Floats)(packed << 16) * (Floats)(both << 16);
#endif
}

// Rows of numbers in memory.
template <class T>
struct Block {
  T* numbers;
  int stride;
  T* row(int r) const { return numbers + (size_t)r * stride; }
  Block at(int r, int column) const { return {row(r) + column, stride}; }
};

// ROWS rows of x with PANELS panels of W, which lie behind each other at `weights`.
template <int ROWS, int PANELS, class W, class A>
inline void tile(const W* weights, int inputs, Block<const A> x, Block<float> y) {
  constexpr int V = PANELS * VECTORS, STEP = sizeof(W) == 2 ? 2 : 1;
  constexpr bool PAIRS = STEP == 2 && sizeof(A) == 2;
  Floats sums[ROWS][V] = {};
  for (int k = 0; k < inputs; k += STEP)
    for (int part = 0; part < (PAIRS ? 1 : STEP); part++) {
      Floats here[V];  // of one input at a time: they share the registers with the sums
      for (int v = 0; v < V; v++) {
        const size_t panel = (size_t)(v / VECTORS) * inputs + k;
        const W* place = weights + panel * PANEL + v % VECTORS * LANES * STEP;
        here[v] = load(reinterpret_cast<const float*>(place));
        // The next tile's, meanwhile: processors' own guesses end with each 4 KiB.
        if (part == 0) __builtin_prefetch(place + (size_t)PANELS * PANEL * inputs, 0, 2);
        if (STEP == 2 && !PAIRS)
          here[v] = (Floats)(part ? (Bits)here[v] & 0xffff0000u : (Bits)here[v] << 16);
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) add_product(sums[r][v], here[v], x.row(r) + k + part);
    }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < V; v++) store(y.row(r) + v * LANES, sums[r][v]);
}

// Panels of a tile: the most, up to four, that fit the registers.
constexpr int panels_of(int rows) {
  int panels = 4;
  while (panels > 1 && panels * VECTORS * (rows + 1) + 1 > REGISTERS) panels /= 2;
  return panels;
}

template <int ROWS, int PANELS, class W, class A>
inline void tiles(const W* w, int count, int inputs, Block<const A> x, Block<float> y) {
  int done = 0;
  for (; done + PANELS <= count; done += PANELS)
    tile<ROWS, PANELS>(w + (size_t)done * PANEL * inputs, inputs, x, y.at(0, done * PANEL));
  if constexpr (PANELS > 1)
    tiles<ROWS, PANELS / 2>(w + (size_t)done * PANEL * inputs, count - done, inputs, x,
                            y.at(0, done * PANEL));
}

template <int ROWS, class W, class A>
inline void some_rows(int rows, const W* w, int count, int inputs, Block<const A> x, Block<float> y) {
  if (rows == ROWS) tiles<ROWS, panels_of(ROWS)>(w, count, inputs, x, y);
  else if constexpr (ROWS > 1) some_rows<ROWS - 1>(rows, w, count, inputs, x, y);
}

// `count` panels with any number of rows, in tiles of nearly equal height.
template <class W, class A>
void all_rows(const W* w, int count, int inputs, Block<const A> x, int rows, Block<float> y) {
  const long parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (long part = 0, done = 0; part < parts; part++) {
    const long end = rows * (part + 1) / parts;
    some_rows<MOST_ROWS>(end - done, w, count, inputs, x.at(done, 0), y.at(done, 0));
    done = end;
  }
}

template <class W, class A>
void product_of(const Matrix& m, Block<const A> x, int rows, int from, int to, Block<float> y) {
  const int whole = std::min(to, m.outputs / PANEL * PANEL);
  for (int first = from; first < whole; first += BLOCK) {
    const int count = (std::min(first + BLOCK, whole) - first) / PANEL;
    all_rows(m.panel<W>(first), count, m.inputs, x, rows, y.at(0, first));
  }
  if (whole == to) return;
  std::vector<float> edge((size_t)rows * PANEL);  // outputs are no multiple of a panel
  all_rows(m.panel<W>(whole), 1, m.inputs, x, rows, {edge.data(), PANEL});
  for (int r = 0; r < rows; r++) std::copy_n(&edge[r * PANEL], to - whole, y.row(r) + whole);
}

// Outputs from ... to - 1 (`from` a multiple of 16) of rows of x, to the same columns of y.
template <class A>
void product(const Matrix& m, Block<const A> x, int rows, int from, int to, Block<float> y) {
  if (from >= to) return;
  if (m.halves) product_of<bfloat16>(m, x, rows, from, to, y);
  else if constexpr (sizeof(A) == 4) product_of<float>(m, x, rows, from, to, y);
  if (m.bias.empty()) return;
  for (int r = 0; r < rows; r++)
    for (int i = from; i < to; i++) y.row(r)[i] += m.bias[i];
}

}  // namespace eaglegbv
