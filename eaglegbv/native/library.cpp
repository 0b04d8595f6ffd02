// The library as `eaglegbv.native.library` calls it: objects are pointers, arrays belong to callers.
#include "model.h"
#include "rows.h"

using namespace eaglegbv;

extern "C" {

// Weights [outputs, inputs] of 2 or 4 bytes each, kept as bfloat16 (`halves`) or as they are.
void* matrix_new(const void* weights, int bytes, int outputs, int inputs, int halves, const float* bias) {
  if (bytes == 2) return new Matrix(static_cast<const bfloat16*>(weights), outputs, inputs, true, bias);
  return new Matrix(static_cast<const float*>(weights), outputs, inputs, halves, bias);
}

void matrix_free(void* matrix) { delete static_cast<Matrix*>(matrix); }

void* model_new(const ModelFacts* facts) {
  AnyModel* model;
  if (facts->element_bytes == 2) model = new Model<bfloat16>(*facts);
  else model = new Model<float>(*facts);
  return model;
}

void model_free(void* model) { delete static_cast<AnyModel*>(model); }

void model_use_pool(void* model, void* keys, void* values, int64_t slots) {
  static_cast<AnyModel*>(model)->use_pool(keys, values, slots);
}

void model_forward(void* model, const Segment* segments, int count, const int64_t* wanted,
                   int num_wanted, float* logits, void* features, int threads) {
  static_cast<AnyModel*>(model)->forward(segments, count, wanted, num_wanted, logits, features, threads);
}

void model_level(void* model, const Segment* segments, int count, const void* states,
                 int reads_features, void* next, float* logits, int threads) {
  static_cast<AnyModel*>(model)->level(segments, count, states, reads_features, next, logits, threads);
}

// Of logits [rows, vocab] at a temperature each: warped logits, and their logs of sums [rows].
void rows_warp(const float* x, int rows, int vocab, const float* temperatures, float* out,
               double* normalisers, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; r++)
    normalisers[r] = warp(x + (size_t)r * vocab, vocab, temperatures[r], out + (size_t)r * vocab);
}

// The places [rows, width] of the most likely tokens, and their probabilities among themselves.
void rows_candidates(const float* x, int rows, int vocab, int width, const float* temperatures,
                     int64_t* places, double* probs, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; r++) {
    const float* row = x + (size_t)r * vocab;
    likeliest(row, vocab, width, places + (size_t)r * width);
    probabilities(row, places + (size_t)r * width, width, temperatures[r], probs + (size_t)r * width);
  }
}

void model_logits(void* model, const void* states, int rows, float* logits, int threads) {
  static_cast<AnyModel*>(model)->logits_of(states, rows, logits, threads);
}

}
