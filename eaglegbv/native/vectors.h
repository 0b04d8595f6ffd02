// Vectors of float32 as wide as the processor's registers, and the two types of elements.
//
// GCC's and clang's vector types: the compiler chooses instructions for the machine it builds for.
// No sum runs in an order that the data's place or size in a batch could change: that makes a row's
// numbers the same whatever is computed beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace eaglegbv {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;  // numbers in a register, and registers
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

using Floats = float __attribute__((vector_size(4 * LANES), may_alias));
using FloatsAnywhere = float __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
using Bits = uint32_t __attribute__((vector_size(4 * LANES), may_alias));
using BitsAnywhere = uint32_t __attribute__((vector_size(4 * LANES), may_alias, aligned(2)));
using Integers = int32_t __attribute__((vector_size(4 * LANES), may_alias));
using Halves = uint16_t __attribute__((vector_size(2 * LANES), may_alias, aligned(2)));

struct bfloat16 {
  uint16_t bits;
};

template <class T>
inline void assign(T& to, T from) {
  to = from;
}

inline void assign(bfloat16& to, float from) {  // that is exact in bfloat16
  uint32_t bits;
  memcpy(&bits, &from, sizeof(bits));
  to.bits = bits >> 16;
}

inline Floats load(const float* x) { return *reinterpret_cast<const FloatsAnywhere*>(x); }

inline Floats load(const bfloat16* x) {
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(x), Bits) << 16);
}

inline void store(float* out, Floats x) { *reinterpret_cast<FloatsAnywhere*>(out) = x; }

// Rounds to the nearest, ties to even; what is no number stays so.
inline void store(bfloat16* out, Floats x) {
  const Bits bits = (Bits)x;
  const Bits nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits kept = x == x ? nearest : Bits{} + 0x7fc0;
  *reinterpret_cast<Halves*>(out) = __builtin_convertvector(kept, Halves);
}

// exp within a unit in the last place (Cephes' polynomial); 0 below exp(-87), NaN of NaN.
inline Floats exponential(Floats x) {
  Floats bounded = x > 88.f ? Floats{} + 88.f : x;
  bounded = bounded < -87.f ? Floats{} - 87.f : bounded;
  const Floats n = (bounded * 1.44269504f + 12582912.f) - 12582912.f;  // rounded to an integer
  const Floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;    // ln 2 in two parts
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const Floats power = (Floats)((__builtin_convertvector(n, Integers) + 127) << 23);
  return x < -87.f ? Floats{} : p * power;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats x) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

inline float largest(Floats x) {
  for (int i = 1; i < LANES; i++) x[0] = x[i] > x[0] ? x[i] : x[0];
  return x[0];
}

// Lane i of the lower halves of all groups of 2 S lanes of two vectors, one after the other.
constexpr int lower(int S, int i) {
  const int within = i % (LANES / 2);
  return i / (LANES / 2) * LANES + within / S * 2 * S + within % S;
}

template <int S, int... I>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, lower(S, I)...) +
         __builtin_shufflevector(a, b, (lower(S, I) + S)...);
}

// The sums of N vectors, in the lanes of one, from N = LANES on: all of them take as many
// operations as two would on their own. Each is summed in the order of `sum`.
template <int N>
inline Floats sums(const Floats* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    Floats half[N / 2];
    for (int i = 0; i < N / 2; i++)
      half[i] = fold<N / 2>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, LANES>{});
    return sums<N / 2>(half);
  }
}

}  // namespace eaglegbv
