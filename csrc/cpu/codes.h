// SPDX-License-Identifier: Apache-2.0
// Codes of one byte, and bfloat16, as vectors of floats and back: what lies at even places in one
// vector, what lies at odd places in another, so that nothing moves between lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../segreuse/rotate.h"
#include "vectors.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace segreuse::cpu {

constexpr int kCodes = 2 * kLanes;  // elements that are converted at once

typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));  // two codes each
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));   // two elements of bfloat16 each

template <class Vector>
inline Vector load_as(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

struct Halves {
  Floats even, odd;
};

inline Floats as_floats(Words bits) { return (Floats)bits; }
inline Words as_words(Floats value) { return (Words)value; }

struct Int8 {
  static constexpr float kLargest = 127.0f;
  static float decode(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
  static uint8_t encode(float value) {
    return static_cast<uint8_t>(bits_of(value + kUnit) - bits_of(kUnit));
  }

  // Decoded, times `kFactor`: a code is converted where it lies, in the upper byte of a word.
  static constexpr float kFactor = 0x1p24f;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static Halves decode(Shorts codes) {
    // One shuffle each, in place of shifts, for which older machines have one unit.
    const __m256i both = _mm256_broadcastsi128_si256(load_as<__m128i>(&codes));
    return {_mm256_cvtepi32_ps(_mm256_shuffle_epi8(both, upper_bytes(0))),
            _mm256_cvtepi32_ps(_mm256_shuffle_epi8(both, upper_bytes(1)))};
  }
#else
  static Halves decode(Shorts codes) {
    const Words pairs = __builtin_convertvector(codes, Words);
    const Ints even = (Ints)(pairs << 24), odd = (Ints)((pairs & 0xff00u) << 16);
    return {__builtin_convertvector(even, Floats), __builtin_convertvector(odd, Floats)};
  }
#endif

  // In the low byte.
  static Words encode(Floats value) { return as_words(value + kUnit) & 0xffu; }

 private:
  static constexpr float kUnit = 12582912.0f;  // beside it, one step of float32 is 1

#if defined(__AVX2__) && !defined(__AVX512F__)
  // Takes the code at place 2 i + `odd` to the upper byte of word i.
  static __m256i upper_bytes(int odd) {
    constexpr int kZero = 0x808080;
    const auto word = [odd](int i) { return (2 * i + odd) << 24 | kZero; };
    return _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
  }
#endif
};

struct Fp8 {
  static constexpr float kLargest = 448.0f;
  static float decode(uint8_t code) {
    // In the place of a float32's bits it is too small by the difference of the biases. No NaN.
    const uint32_t bits = uint32_t{code & 0x80u} << 24 | uint32_t{code & 0x7fu} << 20;
    return float_of(bits) * 0x1p120f;
  }
  static uint8_t encode(float value) { return Float8E4M3::encode(value); }

#if defined(__F16C__)
  // In the place of a float16's bits it is too small by the difference of the biases, too; unlike
  // those of float32, small numbers of float16 cost no time.
  static constexpr float kFactor = 0x1p-8f;
  static Halves decode(Shorts codes) {
    typedef int16_t Signed __attribute__((vector_size(2 * kLanes)));
    const Signed even = (Signed)(codes << 8) >> 1, odd = (Signed)codes >> 1;
    return {widened((Shorts)even & kPlaces), widened((Shorts)odd & kPlaces)};
  }
#else
  static constexpr float kFactor = 0x1p-120f;
  static Halves decode(Shorts codes) {
    const Words pairs = __builtin_convertvector(codes, Words);
    const Ints even = (Ints)(pairs << 24) >> 4, odd = (Ints)((pairs & 0xff00u) << 16) >> 4;
    return {as_floats((Words)even & 0x87f00000u), as_floats((Words)odd & 0x87f00000u)};
  }
#endif

  // As `SmallFloat`, in the low byte. No NaN.
  static Words encode(Floats value) {
    constexpr uint32_t kUnit = 141u << 23, kSmallest = 121u << 23, kBase = 120u << 23;
    const Words bits = as_words(value), sizes = bits & 0x7fffffffu;
    const Words unit = Words{} + kUnit;
    const Words small = as_words(as_floats(sizes) + as_floats(unit)) - unit;
    const Words moved = sizes - kBase;
    const Words rounded = (moved + 0x7ffffu + ((moved >> 20) & 1u)) >> 20;
    const Words code = (Ints)sizes < (Ints)(Words{} + kSmallest) ? small : rounded;
    const Words most = Words{} + 0x7eu;
    return ((Ints)code < (Ints)most ? code : most) | ((bits >> 24) & 0x80u);
  }

 private:
#if defined(__F16C__)
  static constexpr uint16_t kPlaces = 0xbf80u;
  static Floats widened(Shorts halves) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load_as<__m256i>(&halves));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(load_as<__m128i>(&halves));
#endif
  }
#endif
};

// Codes of the low bytes, side by side.
inline Shorts joined_codes(Words even, Words odd) {
  return __builtin_convertvector(even | odd << 8, Shorts);
}

// bfloat16, which has no NaN here.
inline Halves widened(Words pairs) {
  return {as_floats(pairs << 16), as_floats(pairs & 0xffff0000u)};
}

// Rounded to nearest even, in the upper half of each word. No NaN.
inline Words rounded(Floats value) {
  const Words bits = as_words(value);
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The lowest bit that stays, by a product: older machines have one unit for shifts.
  const Words lowest = bits & 0x10000u, ones = Words{} + 0x10000u;
  return (bits + 0x7fffu) + (Words)_mm256_madd_epi16((__m256i)lowest, (__m256i)ones);
#else
  return bits + 0x7fffu + ((bits >> 16) & 1u);
#endif
}

inline Words joined(const Halves& value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Words)_mm256_blend_epi16((__m256i)(rounded(value.even) >> 16),
                                   (__m256i)rounded(value.odd), 0xaa);
#else
  return rounded(value.even) >> 16 | (rounded(value.odd) & 0xffff0000u);
#endif
}

}  // namespace segreuse::cpu
