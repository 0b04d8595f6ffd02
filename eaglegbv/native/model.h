// A model of Llama's shape: the target, or the one layer of an EAGLE head.
//
// E is the type of keys, values, embeddings and features. What enters a product (Input) is float32,
// or bfloat16 where products are of pairs; the residual stream, norms and all sums are float32.
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "products.h"
#include "threads.h"

namespace eaglegbv {

struct LayerFacts {
  const Matrix *qkv, *attention_output, *gate_up, *down;
  const float *input_norm, *post_norm;  // before attention (null: none), before the feed-forward
  const float *q_norm, *k_norm;         // of every head before it is rotated; null: none
  int64_t window;                       // sliding window, 0: none
};

struct ModelFacts {
  int32_t element_bytes;  // of E: 2 or 4
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, num_features;
  int32_t feature_parts;         // head: features are normed in so many equal parts
  int32_t norm_before_residual;  // head: the residual stream starts at the normed state
  int32_t norm_output;           // head: the recurrent state is normed
  float eps, rotary_scale;
  const void* embedding;  // [vocab, hidden] of E
  const float* frequencies;  // [head_dim / 2], of the rotary embedding
  const float *norm;  // before the output layer; null: none
  const float *hidden_norm, *feature_norm;  // head: of the state (null: EAGLE-1), of features
  const Matrix *output, *fc;                // fc reads features (EAGLE-3), or token and state
  const LayerFacts* layers;
  const int32_t* features;  // layers whose inputs are captured, -1: the state after the last norm
};

// Rows [rows, width] of T that grow, and never shrink.
template <class T>
struct Rows {
  std::vector<T> numbers;
  int width;
  explicit Rows(int width) : width(width) {}
  void reserve(size_t rows) {
    if (numbers.size() < rows * width) numbers.resize(rows * width);
  }
  T* operator[](size_t row) { return &numbers[row * width]; }
  Block<T> block() { return {numbers.data(), width}; }
  Block<const T> read() const { return {numbers.data(), width}; }
};

// y = x / rms(x) * weights over `width` numbers, a multiple of 16; without weights x itself.
template <class T>
void norm(const float* x, const float* weights, float eps, int width, T* y) {
  float scale = 1.f;
  if (weights) {
    Floats squares = {};
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    scale = 1.f / std::sqrt(sum(squares) / width + eps);
  }
  for (int i = 0; i < width; i += LANES)
    store(y + i, weights ? load(x + i) * scale * load(weights + i) : load(x + i));
}

template <class From, class To>
void copy(const From* x, int width, To* y) {
  for (int i = 0; i < width; i += LANES) store(y + i, load(x + i));
}

struct AnyModel {
  virtual ~AnyModel() = default;
  virtual void use_pool(void* keys, void* values, int64_t slots) = 0;
  virtual void forward(const Segment* segments, int count, const int64_t* wanted, int num_wanted,
                       float* logits, void* features, int threads) = 0;
  virtual void level(const Segment* segments, int count, const void* states, bool reads_features,
                     void* next, float* logits, int threads) = 0;
  virtual void logits_of(const void* states, int rows, float* logits, int threads) = 0;
};

template <class E>
class Model : public AnyModel {
  using Input = std::conditional_t<PAIRED, E, float>;

 public:
  explicit Model(const ModelFacts& facts)
      : f_(facts),
        layers_(facts.layers, facts.layers + facts.num_layers),
        captured_(facts.features, facts.features + facts.num_features),
        queries_(facts.heads * facts.head_dim),
        keys_(facts.kv_heads * facts.head_dim),
        stream_(facts.hidden),
        added_(facts.hidden),
        projected_(queries_ + 2 * keys_),
        attended_(queries_),
        gate_up_(2 * facts.intermediate),
        rotation_(facts.head_dim),
        input_(std::max(2 * facts.hidden, facts.feature_parts ? facts.fc->inputs : 0)),
        attention_input_(queries_),
        activated_(facts.intermediate) {}

  void use_pool(void* keys, void* values, int64_t slots) override {
    key_pool_ = static_cast<E*>(keys);
    value_pool_ = static_cast<E*>(values);
    slots_ = slots;
  }

  // Logits [num_wanted, vocab] of the wanted rows (null: all), and features [rows, captured, hidden].
  void forward(const Segment* segments, int count, const int64_t* wanted, int num_wanted,
               float* logits, void* features, int threads) override {
    load_rows(segments, count);
    const int R = rows_.size(), H = f_.hidden;
    in_team(barrier_, threads, [&](Team& team) {
      Workspace work;
      for (int r = team.number; r < R; r += team.size) {
        copy(embedding(rows_[r].token), H, stream_[r]);
        rotate_angles(r);
      }
      for (int layer = 0; layer < f_.num_layers; layer++) {
        for (int r = team.number; r < R; r += team.size) {
          capture(layer, r, static_cast<E*>(features));
          norm(stream_[r], layers_[layer].input_norm, f_.eps, H, input_[r]);
        }
        team.wait();
        run_layer(layer, team, work);
      }
      for (int r = team.number; r < R; r += team.size) capture(-1, r, static_cast<E*>(features));
      finish(team, wanted, num_wanted, logits);
    });
  }

  // A level of a head: rows continue `states` [rows, hidden], or read features that fc projects.
  // Writes the next states, and logits [rows, vocab] unless null.
  void level(const Segment* segments, int count, const void* states, bool reads_features,
             void* next, float* logits, int threads) override {
    load_rows(segments, count);
    const int R = rows_.size(), H = f_.hidden;
    const LayerFacts& layer = layers_[0];
    const E* given = static_cast<const E*>(states);
    const bool eagle3 = f_.hidden_norm;
    in_team(barrier_, threads, [&](Team& team) {
      Workspace work;
      if (eagle3 && reads_features) {
        const int width = f_.fc->inputs;
        for (int r = team.number; r < R; r += team.size)
          norm_features(given + (size_t)r * width, input_[r], work);
        team.wait();
        multiply(*f_.fc, input_, R, team, stream_.block());
        team.wait();
      } else if (eagle3) {
        for (int r = team.number; r < R; r += team.size)
          copy(given + (size_t)r * H, H, stream_[r]);
      }
      for (int r = team.number; r < R; r += team.size) {
        rotate_angles(r);
        work.numbers.resize(2 * H);
        copy(embedding(rows_[r].token), H, &work.numbers[0]);
        float* state = eagle3 ? stream_[r] : &work.numbers[H];
        if (!eagle3) copy(given + (size_t)r * H, H, state);
        norm(&work.numbers[0], layer.input_norm, f_.eps, H, input_[r]);
        norm(state, f_.hidden_norm, f_.eps, H, input_[r] + H);
        if (f_.norm_before_residual) norm(state, f_.hidden_norm, f_.eps, H, state);
      }
      team.wait();
      if (!eagle3) {  // x = fc(token, state), and attention reads x without a norm
        multiply(*f_.fc, input_, R, team, stream_.block());
        team.wait();
        for (int r = team.number; r < R; r += team.size) copy(stream_[r], H, input_[r]);
        team.wait();
      }
      run_layer(0, team, work);
      for (int r = team.number; r < R; r += team.size) {
        E* out = static_cast<E*>(next) + (size_t)r * H;
        if (f_.norm_output) norm(stream_[r], f_.norm, f_.eps, H, stream_[r]);
        copy(stream_[r], H, out);
        copy(out, H, stream_[r]);  // logits are those of the state as it is handed on
      }
      if (logits) finish(team, nullptr, R, logits);
    });
  }

  // Logits [rows, vocab] of a head's states [rows, hidden].
  void logits_of(const void* states, int rows, float* logits, int threads) override {
    reserve(rows);
    in_team(barrier_, threads, [&](Team& team) {
      const E* given = static_cast<const E*>(states);
      for (int r = team.number; r < rows; r += team.size)
        copy(given + (size_t)r * f_.hidden, f_.hidden, stream_[r]);
      finish(team, nullptr, rows, logits);
    });
  }

 private:
  struct Workspace {  // of a thread
    VisibleKeys keys;
    std::vector<float> scores, numbers;
  };

  void reserve(size_t rows) {
    for (auto* part : {&stream_, &added_, &projected_, &attended_, &gate_up_, &rotation_})
      part->reserve(rows);
    for (auto* part : {&input_, &attention_input_, &activated_}) part->reserve(rows);
  }

  void load_rows(const Segment* segments, int count) {
    rows_.clear();
    for (const Segment* s = segments; s < segments + count; s++)
      for (int64_t i = 0; i < s->num_new; i++)
        rows_.push_back({s, i, s->tokens[i], s->positions[i], s->pending[s->num_pending - s->num_new + i]});
    reserve(rows_.size());
  }

  const E* embedding(int64_t token) const {
    return static_cast<const E*>(f_.embedding) + token * f_.hidden;
  }

  // Cosines, then sines, of a row's position: angles in float32, as transformers computes them.
  void rotate_angles(int r) {
    const int half = f_.head_dim / 2;
    for (int i = 0; i < half; i++) {
      const float angle = (float)rows_[r].position * f_.frequencies[i];
      rotation_[r][i] = std::cos(angle) * f_.rotary_scale;
      rotation_[r][half + i] = std::sin(angle) * f_.rotary_scale;
    }
  }

  void capture(int layer, int r, E* features) {
    if (!features) return;
    for (size_t i = 0; i < captured_.size(); i++) {
      E* out = features + (r * captured_.size() + i) * f_.hidden;
      if (captured_[i] == layer)
        norm(stream_[r], layer < 0 ? f_.norm : nullptr, f_.eps, f_.hidden, out);
    }
  }

  void norm_features(const E* features, Input* out, Workspace& work) {
    const int width = f_.fc->inputs, part = width / f_.feature_parts;
    work.numbers.resize(width);
    copy(features, width, work.numbers.data());
    for (int at = 0; at < width; at += part)
      norm(&work.numbers[at], f_.feature_norm ? f_.feature_norm + at : nullptr, f_.eps, part, out + at);
  }

  // This thread's outputs of a product of all rows.
  void multiply(const Matrix& m, const Rows<Input>& x, int rows, Team& team, Block<float> y) {
    const auto [from, to] = team.share(m.outputs, PANEL);
    product(m, x.read(), rows, from, to, y);
  }

  void add(const Matrix& m, const Rows<Input>& x, Team& team) {
    const int R = rows_.size();
    const auto [from, to] = team.share(f_.hidden, PANEL);
    product(m, x.read(), R, from, to, added_.block());
    for (int r = 0; r < R; r++)
      for (int i = from; i < to; i += LANES)
        store(stream_[r] + i, load(stream_[r] + i) + load(added_[r] + i));
    team.wait();
  }

  // The output layer on the wanted rows of the residual stream, normed.
  void finish(Team& team, const int64_t* wanted, int num_wanted, float* logits) {
    team.wait();
    const bool normed = f_.norm_output;
    for (int r = team.number; r < num_wanted; r += team.size)
      norm(stream_[wanted ? wanted[r] : r], normed ? nullptr : f_.norm, f_.eps, f_.hidden, input_[r]);
    team.wait();
    multiply(*f_.output, input_, num_wanted, team, {logits, f_.vocab});
  }

  // One decoder layer behind its first norm: from input_ to the residual stream.
  void run_layer(int number, Team& team, Workspace& work) {
    const LayerFacts& layer = layers_[number];
    const int R = rows_.size(), H = f_.hidden, D = f_.head_dim, I = f_.intermediate;
    E* keys = key_pool_ + number * slots_ * keys_;
    E* values = value_pool_ + number * slots_ * keys_;
    const auto [first, end] = team.share(queries_ + 2 * keys_, D);  // whole heads, to rotate them
    product(*layer.qkv, input_.read(), R, first, end, projected_.block());
    for (int r = 0; r < R; r++)
      for (int head = first / D; head < end / D; head++) project(layer, r, head, keys, values);
    team.wait();
    for (int u = team.number; u < R * f_.kv_heads; u += team.size) {
      const int r = u / f_.kv_heads, head = u % f_.kv_heads, shared = f_.heads / f_.kv_heads;
      const int at = head * shared * D;
      work.keys.see(rows_[r], layer.window);
      attend_all<E>(shared, work.keys, {keys + head * D, keys_}, {values + head * D, keys_}, D,
                    projected_[r] + at, work.scores, attended_[r] + at);
      copy(attended_[r] + at, shared * D, attention_input_[r] + at);
    }
    team.wait();
    add(*layer.attention_output, attention_input_, team);
    for (int r = team.number; r < R; r += team.size)
      norm(stream_[r], layer.post_norm, f_.eps, H, input_[r]);
    team.wait();
    const auto [from, to] = team.share(I, PANEL);
    for (const int half : {0, I})
      product(*layer.gate_up, input_.read(), R, half + from, half + to, gate_up_.block());
    for (int r = 0; r < R; r++)
      for (int i = from; i < to; i += LANES) {
        const Floats gate = load(gate_up_[r] + i);
        store(activated_[r] + i, gate / (1.f + exponential(-gate)) * load(gate_up_[r] + I + i));
      }
    team.wait();
    add(*layer.down, activated_, team);
  }

  // Norms and rotates a query or key head of a row; keys and values enter the pool.
  void project(const LayerFacts& layer, int r, int head, E* keys, E* values) {
    const int D = f_.head_dim, half = D / 2;
    const int64_t at = rows_[r].slot * keys_ + (head - f_.heads) * D;
    float* x = projected_[r] + head * D;
    if (head >= f_.heads + f_.kv_heads) return copy(x, D, values + at - keys_);
    const float* weights = head < f_.heads ? layer.q_norm : layer.k_norm;
    if (weights) norm(x, weights, f_.eps, D, x);
    const float *cosines = rotation_[r], *sines = cosines + half;
    for (int i = 0; i < half; i++) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosines[i] - b * sines[i];
      x[i + half] = b * cosines[i] + a * sines[i];
    }
    if (head >= f_.heads) copy(x, D, keys + at);
  }

  const ModelFacts f_;
  const std::vector<LayerFacts> layers_;
  const std::vector<int> captured_;
  const int queries_, keys_;  // widths of a row's queries, and of its keys
  Rows<float> stream_, added_, projected_, attended_, gate_up_, rotation_;
  Rows<Input> input_, attention_input_, activated_;
  std::vector<Row> rows_;
  E *key_pool_ = nullptr, *value_pool_ = nullptr;
  int64_t slots_ = 0;
  Barrier barrier_;
};

}  // namespace eaglegbv
