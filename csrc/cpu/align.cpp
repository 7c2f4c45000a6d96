// SPDX-License-Identifier: Apache-2.0
// Copy cached tokens to other slots, keys turned by the distance they move (kernels/reference.py,
// `align`). Bit for bit what the reference computes: compile with -ffp-contract=off.
//
// Work is shared out by layer, run of tokens and head. Along a run the angles are the same, so in
// pages that keep a channel's tokens side by side (vLLM's CPU backend) one pair of scalars turns a
// vector of tokens; in pages that keep a token's channels side by side, vectors of angles turn it.

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace segreuse::cpu {
namespace {

template <class Format>
using Code = typename Format::Code;

// Turn `count` pairs with one angle; elements lie `step` apart.
template <class Format>
inline void turn_tokens(const Code<Format>* first, const Code<Format>* second,
                        Code<Format>* out_first, Code<Format>* out_second, int count, int step,
                        float cos, float sin) {
  for (int i = 0; i < count * step; i += step) {
    float a = Format::decode(first[i]), b = Format::decode(second[i]);
    turn(a, b, cos, sin);
    out_first[i] = Format::encode(a);
    out_second[i] = Format::encode(b);
  }
}

#if defined(__AVX512BW__)
// 32 numbers as two vectors of floats, and back: rounds to nearest even, as BFloat16::encode does.
struct Floats32 {
  __m512 low, high;
};

inline Floats32 widen(__m512i codes) {
  const auto half = [](__m256i part) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
  };
  return {half(_mm512_castsi512_si256(codes)), half(_mm512_extracti64x4_epi64(codes, 1))};
}

inline __m256i narrow(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

inline __m512i narrow(Floats32 value) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(value.low)), narrow(value.high), 1);
}

template <>
inline void turn_tokens<BFloat16>(const uint16_t* first, const uint16_t* second,
                                  uint16_t* out_first, uint16_t* out_second, int count, int step,
                                  float cos, float sin) {
  if (step != 1) {
    for (int i = 0; i < count * step; i += step) {
      float a = BFloat16::decode(first[i]), b = BFloat16::decode(second[i]);
      turn(a, b, cos, sin);
      out_first[i] = BFloat16::encode(a);
      out_second[i] = BFloat16::encode(b);
    }
    return;
  }
  const __m512 c = _mm512_set1_ps(cos), s = _mm512_set1_ps(sin);
  for (int i = 0; i < count; i += 32) {
    const __mmask32 mask = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
    const Floats32 a = widen(_mm512_maskz_loadu_epi16(mask, first + i));
    const Floats32 b = widen(_mm512_maskz_loadu_epi16(mask, second + i));
    const auto turned_first = [&](__m512 x, __m512 y) {
      return _mm512_sub_ps(_mm512_mul_ps(x, c), _mm512_mul_ps(y, s));
    };
    const auto turned_second = [&](__m512 x, __m512 y) {
      return _mm512_add_ps(_mm512_mul_ps(y, c), _mm512_mul_ps(x, s));
    };
    _mm512_mask_storeu_epi16(
        out_first + i, mask,
        narrow(Floats32{turned_first(a.low, b.low), turned_first(a.high, b.high)}));
    _mm512_mask_storeu_epi16(
        out_second + i, mask,
        narrow(Floats32{turned_second(a.low, b.low), turned_second(a.high, b.high)}));
  }
}
#endif

// One head of one half of a page: where its channels lie, and which of them turn.
template <class Format>
class HeadMover {
 public:
  HeadMover(const Part& part, int head) : strides_(part.strides), rotation_(part.rotation) {
    for (int c = 0; c < strides_.channels; ++c) at_.push_back(strides_.of_channel(head, c));
    // Many tokens in a row, or many channels: whichever gives the longer vectors.
    by_tokens_ = strides_.token_tile >= 8 && strides_.token_lo < strides_.channels;
    unit_channels_ = strides_.in_vectors_of(1) && strides_.channel_lo == 1 &&
                     strides_.channel_tile == strides_.channels;
  }

  // `count` tokens from offset `from` of a page to offset `to` of another.
  void move(const Code<Format>* source, int from, Code<Format>* target, int to, int count,
            const float* cos, const float* sin) const {
    const int tile = strides_.token_tile;
    while (count > 0) {
      const int step = std::min({count, tile - from % tile, tile - to % tile});
      const Code<Format>* s = source + strides_.of_token(from);
      Code<Format>* t = target + strides_.of_token(to);
      if (by_tokens_)
        by_tokens(s, t, step, cos, sin);
      else
        by_channels(s, t, step, cos, sin);
      from += step, to += step, count -= step;
    }
  }

 private:
  int partner(int pair, int* second) const {
    const int half = rotation_.dim / 2;
    *second = rotation_.first + (rotation_.neox ? half + pair : 2 * pair + 1);
    return rotation_.first + (rotation_.neox ? pair : 2 * pair);
  }

  void by_tokens(const Code<Format>* s, Code<Format>* t, int count, const float* cos,
                 const float* sin) const {
    const int step = strides_.token_lo;
    for (int c = 0; c < strides_.channels; ++c) {
      if (c == rotation_.first && rotation_.dim) c += rotation_.dim;
      if (c >= strides_.channels) break;
      copy(s + at_[c], t + at_[c], count, step);
    }
    for (int pair = 0; pair < rotation_.dim / 2; ++pair) {
      int second;
      const int first = partner(pair, &second);
      turn_tokens<Format>(s + at_[first], s + at_[second], t + at_[first], t + at_[second], count,
                          step, cos[pair], sin[pair]);
    }
  }

  void by_channels(const Code<Format>* s, Code<Format>* t, int count, const float* cos,
                   const float* sin) const {
    const int channels = strides_.channels, step = strides_.token_lo;
    if (unit_channels_ && !rotation_.dim) {
      if (step == channels) {  // the head's tokens lie one behind the other
        std::memcpy(t + at_[0], s + at_[0], sizeof(Code<Format>) * channels * count);
      } else {
        for (int i = 0; i < count; ++i)
          std::memcpy(t + at_[0] + i * step, s + at_[0] + i * step, sizeof(Code<Format>) * channels);
      }
      return;
    }
    const int last = rotation_.first + rotation_.dim, half = rotation_.dim / 2;
    for (int i = 0; i < count; ++i, s += step, t += step) {
      for (int c = 0; c < channels; ++c)
        if (c < rotation_.first || c >= last) t[at_[c]] = s[at_[c]];
      if (unit_channels_ && rotation_.neox) {
        const Code<Format>* in = s + at_[rotation_.first];
        Code<Format>* out = t + at_[rotation_.first];
        for (int p = 0; p < half; ++p) {
          float a = Format::decode(in[p]), b = Format::decode(in[half + p]);
          turn(a, b, cos[p], sin[p]);
          out[p] = Format::encode(a);
          out[half + p] = Format::encode(b);
        }
        continue;
      }
      for (int p = 0; p < half; ++p) {
        int second;
        const int first = partner(p, &second);
        turn_tokens<Format>(s + at_[first], s + at_[second], t + at_[first], t + at_[second], 1, 1,
                            cos[p], sin[p]);
      }
    }
  }

  static void copy(const Code<Format>* s, Code<Format>* t, int count, int step) {
    if (step == 1) {
      std::memcpy(t, s, sizeof(Code<Format>) * count);
    } else {
      for (int i = 0; i < count * step; i += step) t[i] = s[i];
    }
  }

  const TiledStrides& strides_;
  const Rotation& rotation_;
  std::vector<int32_t> at_;
  bool by_tokens_, unit_channels_;
};

template <class Format>
void direct(const AlignArgs& args) {
  std::vector<HeadMover<Format>> movers;
  for (int p = 0; p < args.num_parts; ++p)
    for (int h = 0; h < args.parts[p].strides.heads; ++h) movers.emplace_back(args.parts[p], h);
  const int64_t pairs = args.pairs, block = args.block_size;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t layer = 0; layer < args.layers; ++layer) {
    for (int64_t r = 0; r < args.num_runs; ++r) {
      const Run& run = args.runs[r];
      auto* pages = static_cast<Code<Format>*>(args.pages[layer]);
      const auto* source = pages + run.source / block * args.page_stride;
      auto* target = pages + run.target / block * args.page_stride;
      for (const auto& mover : movers)
        mover.move(source, static_cast<int>(run.source % block), target,
                   static_cast<int>(run.target % block), static_cast<int>(run.length),
                   args.cos + run.angle * pairs, args.sin + run.angle * pairs);
    }
  }
}

// Sources may be targets too: all of a layer's tokens are put aside before the first is written.
template <class Format>
void staged(const AlignArgs& args) {
  // In the scratch, a run is a page of its own: [parts, heads, channels, its tokens].
  const int64_t pairs = args.pairs, block = args.block_size;
  int64_t width = 0;
  for (int p = 0; p < args.num_parts; ++p)
    width += int64_t{args.parts[p].strides.heads} * args.parts[p].strides.channels;
  auto* scratch = static_cast<Code<Format>*>(args.scratch);
  const auto elements = [&](const Run& run, int64_t at, auto&& visit) {
    Code<Format>* aside = scratch + at * width;
    for (int p = 0; p < args.num_parts; ++p) {
      const TiledStrides& strides = args.parts[p].strides;
      for (int h = 0; h < strides.heads; ++h)
        for (int c = 0; c < strides.channels; ++c, aside += run.length)
          visit(strides, h, c, aside);
    }
  };
  for (int64_t layer = 0; layer < args.layers; ++layer) {
    auto* pages = static_cast<Code<Format>*>(args.pages[layer]);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < args.num_runs; ++r) {
        const Run& run = args.runs[r];
        const auto* source = pages + run.source / block * args.page_stride;
        const int offset = static_cast<int>(run.source % block);
        const int length = static_cast<int>(run.length);
        const float* cos = args.cos + run.angle * pairs;
        const float* sin = args.sin + run.angle * pairs;
        elements(run, args.scratch_at[r],
                 [&](const TiledStrides& strides, int h, int c, Code<Format>* aside) {
                   for (int i = 0; i < length; ++i)
                     aside[i] = source[strides.address(h, offset + i, c)];
                 });
        // The rows of a pair's channels, put aside, are vectors of tokens.
        Code<Format>* head = scratch + args.scratch_at[r] * width;
        for (int p = 0; p < args.num_parts; ++p) {
          const Part& part = args.parts[p];
          const int half = part.rotation.dim / 2;
          for (int h = 0; h < part.strides.heads; ++h, head += part.strides.channels * run.length) {
            for (int pair = 0; pair < half; ++pair) {
              const int first = part.rotation.first + (part.rotation.neox ? pair : 2 * pair);
              const int second = first + (part.rotation.neox ? half : 1);
              Code<Format>* a = head + first * run.length;
              Code<Format>* b = head + second * run.length;
              turn_tokens<Format>(a, b, a, b, length, 1, cos[pair], sin[pair]);
            }
          }
        }
      }
#pragma omp for schedule(static)
      for (int64_t r = 0; r < args.num_runs; ++r) {
        const Run& run = args.runs[r];
        auto* target = pages + run.target / block * args.page_stride;
        const int offset = static_cast<int>(run.target % block);
        elements(run, args.scratch_at[r],
                 [&](const TiledStrides& strides, int h, int c, Code<Format>* aside) {
                   for (int i = 0; i < run.length; ++i)
                     target[strides.address(h, offset + i, c)] = aside[i];
                 });
      }
    }
  }
}

template <class Format>
void align(const AlignArgs& args) {
  if (args.scratch)
    staged<Format>(args);
  else
    direct<Format>(args);
}

}  // namespace

}  // namespace segreuse::cpu

void segreuse_align(const segreuse::cpu::AlignArgs* args) {
  using namespace segreuse;
  using cpu::DType;
  switch (args->dtype) {
    case DType::kFloat32: return cpu::align<Float32>(*args);
    case DType::kBFloat16: return cpu::align<BFloat16>(*args);
    case DType::kFloat16: return cpu::align<Float16>(*args);
    case DType::kFloat8E4M3: return cpu::align<Float8E4M3>(*args);
    case DType::kFloat8E5M2: return cpu::align<Float8E5M2>(*args);
  }
}
