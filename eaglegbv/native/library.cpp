// The library as `eaglegbv.native.library` calls it: objects are pointers, arrays belong to callers.
#include "model.h"

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

void model_logits(void* model, const void* states, int rows, float* logits, int threads) {
  static_cast<AnyModel*>(model)->logits_of(states, rows, logits, threads);
}

}
