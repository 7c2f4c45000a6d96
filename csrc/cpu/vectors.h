// SPDX-License-Identifier: Apache-2.0
// Vectors of floats in the compiler's own notation, so that one source serves every instruction
// set, and the two things done with them: products of small matrices, and powers of two.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace segreuse::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// `yes` where the condition holds, `no` elsewhere.
inline Floats select(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }

// c[kHeight x kWidth vectors] = (kAdd ? c : 0) + a * b, over `depth`. All row-major; the sums stay
// in registers.
template <int kHeight, int kWidth, bool kAdd>
inline void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, int depth,
                           float* c, int64_t ldc) {
  Floats sum[kHeight][kWidth];
  for (int r = 0; r < kHeight; ++r)
    for (int w = 0; w < kWidth; ++w) sum[r][w] = kAdd ? load(c + r * ldc + w * kLanes) : Floats{};
  for (int k = 0; k < depth; ++k) {
    Floats row[kWidth];
    for (int w = 0; w < kWidth; ++w) row[w] = load(b + k * ldb + w * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < kWidth; ++w) sum[r][w] += a[r * lda + k] * row[w];
  }
  for (int r = 0; r < kHeight; ++r)
    for (int w = 0; w < kWidth; ++w) store(c + r * ldc + w * kLanes, sum[r][w]);
}

// c[rows x columns] = (kAdd ? c : 0) + a * b; columns are a multiple of kLanes.
template <bool kAdd>
inline void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, int depth, float* c,
                     int64_t ldc, int rows, int columns) {
  for (int column = 0; column < columns;) {
    const bool two = columns - column >= 2 * kLanes;
    for (int r = 0; r < rows;) {
      const float* from = a + r * lda;
      float* to = c + r * ldc + column;
      const int left = rows - r;
      const auto block = [&](auto height) {
        constexpr int kHeight = decltype(height)::value;
        if (two)
          multiply_block<kHeight, 2, kAdd>(from, lda, b + column, ldb, depth, to, ldc);
        else
          multiply_block<kHeight, 1, kAdd>(from, lda, b + column, ldb, depth, to, ldc);
        r += kHeight;
      };
      if (left >= kRows)
        block(std::integral_constant<int, kRows>{});
      else if (left >= 4)
        block(std::integral_constant<int, 4>{});
      else
        block(std::integral_constant<int, 1>{});
    }
    column += two ? 2 * kLanes : kLanes;
  }
}

// 2^f for f in [-1/2, 1/2]: its Taylor series.
inline Floats fraction_power(Floats f) {
  Floats value = Floats{} + 1.540353e-4f;
  value = value * f + 1.333356e-3f;
  value = value * f + 9.618129e-3f;
  value = value * f + 5.5504109e-2f;
  value = value * f + 2.4022651e-1f;
  value = value * f + 6.9314718e-1f;
  return value * f + 1.0f;
}

// The same for what is rounded to bfloat16: the cubic of least relative error, 7.5e-5.
inline Floats rough_fraction_power(Floats f) {
  Floats value = Floats{} + 5.5171669e-2f;
  value = value * f + 2.4261113e-1f;
  value = value * f + 6.9326099e-1f;
  return value * f + 9.9992807e-1f;
}

// 2 to the power of x <= 128, relative error below 2e-7, or 1e-4 where `kRough`; 0 below the range
// of normal numbers.
template <bool kRough = false>
inline Floats power_of_two(Floats x) {
  const auto fraction_of = [](Floats f) {
    return kRough ? rough_fraction_power(f) : fraction_power(f);
  };
#if defined(__AVX512F__)
  const __m512 power = (__m512)x;
  const __mmask16 normal = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats fraction = fraction_of((Floats)_mm512_sub_ps(power, whole));
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)fraction, whole);
#else
  const Floats shift = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats lowest = Floats{} - 126.0f;
  const Ints vanishes = x < lowest;
  const Floats bounded = select(vanishes, lowest, x);
  const Floats rounded = bounded + shift;
  const Floats value = fraction_of(bounded - (rounded - shift));
  Ints bits, exponent;
  std::memcpy(&bits, &value, sizeof bits);
  std::memcpy(&exponent, &rounded, sizeof exponent);
  bits += exponent << 23;  // the shift's own bits fall off at the upper end
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return select(vanishes, Floats{}, power);
#endif
}

// Every lane's partner, `kDistance` lanes away.
template <int kDistance>
inline Floats partners(Floats value) {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i ^ kDistance;
  return __builtin_shuffle(value, lanes);
}

template <int kDistance = kLanes / 2>
inline float largest(Floats value) {
  const Floats other = partners<kDistance>(value);
  value = select(other > value, other, value);
  if constexpr (kDistance > 1)
    return largest<kDistance / 2>(value);
  else
    return value[0];
}

inline bool any_above(Floats value, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(bound), _CMP_GT_OQ);
#else
  const Ints above = value > bound;
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= above[i];
  return found;
#endif
}

template <int kDistance = kLanes / 2>
inline float total(Floats value) {
  value += partners<kDistance>(value);
  if constexpr (kDistance > 1)
    return total<kDistance / 2>(value);
  else
    return value[0];
}

}  // namespace segreuse::cpu
