// SPDX-License-Identifier: Apache-2.0
// Rotation of keys, and the number formats of KV caches. Compiles for the host and for CUDA, and
// does not need torch.
//
// Host code must be compiled with -ffp-contract=off: a fused multiply-add would round differently
// from vllm_segreuse/kernels/reference.py. (Device code says so itself, in `turn`.)
#pragma once

#include <cstdint>
#include <cstring>

#include "address.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define SEGREUSE_FP8_INSTRUCTIONS  // before, CUDA's header goes through float64; ours is quicker
#endif
#endif

namespace segreuse {

// The channels of a head that turn: the class of the same name in vllm_segreuse/kernels/pages.py. `dim` is 0
// where nothing turns.
struct Rotation {
  int32_t dim, neox, first;
};

// Turn one pair. Two products and one sum, each rounded, as in the reference.
SEGREUSE_HD void turn(float& first, float& second, float cos, float sin) {
#if defined(__CUDA_ARCH__)
  const float turned = __fsub_rn(__fmul_rn(first, cos), __fmul_rn(second, sin));
  second = __fadd_rn(__fmul_rn(second, cos), __fmul_rn(first, sin));
#else
  const float turned = first * cos - second * sin;
  second = second * cos + first * sin;
#endif
  first = turned;
}

SEGREUSE_HD uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

SEGREUSE_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// A float of `kExponent` and `kMantissa` bits in the low bits of an integer, without special values
// other than those its formats (below) define. Rounds to nearest, ties to even.
template <int kExponent, int kMantissa>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;

  SEGREUSE_HD static uint32_t sign(float value) {
    return (bits_of(value) >> 31) << (kExponent + kMantissa);
  }

  // Magnitude of a number that is not NaN; too large ones give codes beyond the format's largest.
  SEGREUSE_HD static uint32_t encode_magnitude(float value) {
    const uint32_t bits = bits_of(value) & 0x7fffffffu;
    if (bits < (128u - kBias) << 23) {
      // Below the smallest normal number: the sum has the subnormals' unit in its last place.
      const uint32_t unit = (127u - kBias + kDropped + 1) << 23;
      return bits_of(float_of(bits) + float_of(unit)) - unit;
    }
    const uint32_t rebased = bits - ((127u - kBias) << 23);
    const uint32_t odd = (rebased >> kDropped) & 1;
    return (rebased + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;
  }

  // Value of a code that stands for a finite number.
  SEGREUSE_HD static float decode_finite(uint32_t code) {
    const uint32_t magnitude = code & kMagnitude;
    const uint32_t sign_bit = (code & ~kMagnitude) << (31 - kExponent - kMantissa);
    if (magnitude >> kMantissa == 0) {
      const float unit = float_of((128u - kBias - kMantissa) << 23);
      return float_of(sign_bit | bits_of(static_cast<float>(magnitude) * unit));
    }
    return float_of(sign_bit | ((magnitude << kDropped) + ((127u - kBias) << 23)));
  }
};

constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

// The formats: `Code` as stored, `decode` exact, `encode` rounding once to nearest even. The fp8
// formats saturate, infinity included.

struct Float32 {
  using Code = uint32_t;
  SEGREUSE_HD static float decode(Code code) { return float_of(code); }
  SEGREUSE_HD static Code encode(float value) { return bits_of(value); }
};

struct BFloat16 {
  using Code = uint16_t;
  SEGREUSE_HD static float decode(Code code) { return float_of(uint32_t{code} << 16); }
  SEGREUSE_HD static Code encode(float value) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > kInfinity) return static_cast<Code>(kNan >> 16);
    return static_cast<Code>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
#endif
  }
};

struct Float16 {
  using Code = uint16_t;
  using Small = SmallFloat<5, 10>;
  SEGREUSE_HD static float decode(Code code) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(code));
#else
    if ((code & 0x7c00u) != 0x7c00u) return Small::decode_finite(code);
    return float_of(uint32_t{code & 0x8000u} << 16 | (code & 0x3ffu ? kNan : kInfinity));
#endif
  }
  SEGREUSE_HD static Code encode(float value) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(value));
#else
    if (value != value) return 0x7e00u;
    const uint32_t magnitude = Small::encode_magnitude(value);
    return static_cast<Code>(Small::sign(value) | (magnitude < 0x7c00u ? magnitude : 0x7c00u));
#endif
  }
};

struct Float8E4M3 {  // "fn": no infinity, one NaN
  using Code = uint8_t;
  using Small = SmallFloat<4, 3>;
  SEGREUSE_HD static float decode(Code code) {
#if defined(SEGREUSE_FP8_INSTRUCTIONS)
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
#else
    return (code & 0x7fu) == 0x7fu ? float_of(kNan) : Small::decode_finite(code);
#endif
  }
  SEGREUSE_HD static Code encode(float value) {
#if defined(SEGREUSE_FP8_INSTRUCTIONS)
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
    if (value != value) return 0x7fu;
    const uint32_t magnitude = Small::encode_magnitude(value);
    return static_cast<Code>(Small::sign(value) | (magnitude < 0x7eu ? magnitude : 0x7eu));
#endif
  }
};

struct Float8E5M2 {
  using Code = uint8_t;
  using Small = SmallFloat<5, 2>;
  SEGREUSE_HD static float decode(Code code) {
#if defined(SEGREUSE_FP8_INSTRUCTIONS)
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E5M2)));
#else
    return Float16::decode(static_cast<uint16_t>(code << 8));  // its upper half
#endif
  }
  SEGREUSE_HD static Code encode(float value) {
#if defined(SEGREUSE_FP8_INSTRUCTIONS)
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
#else
    if (value != value) return 0x7fu;
    const uint32_t magnitude = Small::encode_magnitude(value);
    return static_cast<Code>(Small::sign(value) | (magnitude < 0x7bu ? magnitude : 0x7bu));
#endif
  }
};

}  // namespace segreuse
