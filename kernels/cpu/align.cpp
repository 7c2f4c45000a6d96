// SPDX-License-Identifier: Apache-2.0
// Copy cached tokens to other slots, keys turned by the distance they move (vllm_segreuse/kernels/reference.py,
// `align`). Bit for bit what the reference computes: compile with -ffp-contract=off.
//
// Work is shared out by layer, run of tokens and head. Along a run the angles are the same, so in
// pages that keep a channel's tokens side by side (vLLM's CPU backend) one pair of scalars turns a
// vector of tokens; in pages that keep a token's channels side by side, vectors of angles turn it.
//
// For the matrix unit (AMX) that backend keeps keys in lines of 16 tokens by 2 channels, and values
// in lines of 2 tokens by 16 channels.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/past_caches.h"
#include "cpu/runs.h"

namespace segreuse::cpu {
namespace {

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
constexpr int kElements = 32;  // of a line

// Where the elements of a target's line come from, for two lines of the source side by side, each
// of `tile` tokens.
struct Lanes {
  __m512i index;
  __mmask32 written;

  Lanes(const Span& first, const Span& second, int tile) : written(0) {
    const int width = kElements / tile;  // channels
    uint16_t from[kElements] = {};
    const auto place = [&](const Span& span, int line) {
      for (int i = 0; i < span.length * width; ++i) {
        const int lane = (span.to % tile * width + i) % kElements;
        from[lane] = static_cast<uint16_t>(line * kElements + span.from % tile * width + i);
        written |= __mmask32{1} << lane;
      }
    };
    place(first, 0);
    place(second, 1);
    index = _mm512_loadu_si512(from);
  }

  __m512i gather(const uint16_t* first, const uint16_t* second) const {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(first), index, _mm512_loadu_si512(second));
  }

  void store(uint16_t* to, __m512i value) const {
    if (written == 0xffffffffu && is_line(to))
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
    else
      _mm512_mask_storeu_epi16(to, written, value);
  }
};

// The elements at even and at odd places as floats: in place, without moving them between lanes.
template <class Format>
struct Halves;

template <>
struct Halves<BFloat16> {
  static __m512 even(__m512i codes) { return _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16)); }
  static __m512 odd(__m512i codes) {
    return _mm512_castsi512_ps(_mm512_and_si512(codes, _mm512_set1_epi32(~0xffff)));
  }
  // Rounded to nearest even, in the upper half of each lane.
  static __m512i rounded(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
  }
  static __m512i join(__m512 even, __m512 odd) {
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(rounded(even), 16), 0xaaaaaaaau, rounded(odd));
  }
};

struct Turn {
  __m512 cos, sin;

  Turn(const float* cosines, const float* sines, int pair)
      : cos(_mm512_set1_ps(cosines[pair])), sin(_mm512_set1_ps(sines[pair])) {}

  __m512 first(__m512 x, __m512 y) const {
    return _mm512_sub_ps(_mm512_mul_ps(x, cos), _mm512_mul_ps(y, sin));
  }
  __m512 second(__m512 x, __m512 y) const {
    return _mm512_add_ps(_mm512_mul_ps(y, cos), _mm512_mul_ps(x, sin));
  }
};

// Turn 32 pairs: those at even places by one angle, those at odd places by another.
template <class Format>
inline void turn_lanes(__m512i& first, __m512i& second, const Turn& even, const Turn& odd) {
  using Parts = Halves<Format>;
  const __m512 even_x = Parts::even(first), odd_x = Parts::odd(first);
  const __m512 even_y = Parts::even(second), odd_y = Parts::odd(second);
  first = Parts::join(even.first(even_x, even_y), odd.first(odd_x, odd_y));
  second = Parts::join(even.second(even_x, even_y), odd.second(odd_x, odd_y));
}

// Turn 16 pairs, each side by side.
template <class Format>
inline __m512i turn_neighbours(__m512i pairs, const Turn& turn) {
  const __m512 x = Halves<Format>::even(pairs), y = Halves<Format>::odd(pairs);
  return Halves<Format>::join(turn.first(x, y), turn.second(x, y));
}

// Tokens from lines that hold two of them to others, which begin at the same place of a line or at
// the other. `step` elements lie between lines.
template <bool kSamePlace>
inline void copy_token_pairs(const uint16_t* from, uint16_t* to, int count, int step,
                             bool begins_odd) {
  constexpr __mmask32 kFirst = 0x55555555u, kSecond = 0xaaaaaaaau;
  const auto load = [](const uint16_t* line) { return _mm512_loadu_si512(line); };
  if (begins_odd) {
    const __m512i line = load(from);
    _mm512_mask_storeu_epi16(to, kSecond, kSamePlace ? line : _mm512_slli_epi32(line, 16));
    to += step, --count;
    if (kSamePlace) from += step;
  }
  for (; count >= 2; from += step, to += step, count -= 2) {
    __m512i line = load(from);
    if constexpr (!kSamePlace)
      line = _mm512_or_si512(_mm512_srli_epi32(line, 16), _mm512_slli_epi32(load(from + step), 16));
    if (is_line(to))
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    else
      _mm512_storeu_si512(to, line);
  }
  if (count) {
    const __m512i line = load(from);
    _mm512_mask_storeu_epi16(to, kFirst, kSamePlace ? line : _mm512_srli_epi32(line, 16));
  }
}
#else
struct Lanes {
  Lanes(const Span&, const Span&, int) {}
};
#endif

// Tokens that stretches fill: of a line.
inline int tile_of(const AlignArgs& args) {
  for (int p = 0; p < args.num_parts; ++p)
    if (args.parts[p].strides.token_tile == kPairedTile) return kPairedTile;
  return kTile;
}

// One head of one half of a page: where its channels lie, and which of them turn.
template <class Format>
class HeadMover {
 public:
  // `tile`: of the stretches that it is given.
  HeadMover(const Part& part, int head, int tile)
      : strides_(part.strides), rotation_(part.rotation), tile_(tile) {
    for (int c = 0; c < strides_.channels; ++c) at_.push_back(strides_.of_channel(head, c));
    // Many tokens in a row, or many channels: whichever gives the longer vectors.
    by_tokens_ = strides_.token_tile >= 8 && strides_.token_lo < strides_.channels;
    unit_channels_ = strides_.channel_lo == 1 && strides_.channel_tile == strides_.channels;
    dense_ = unit_channels_ && !rotation_.dim && strides_.token_lo == strides_.channels &&
             strides_.token_tile == strides_.block_size;
    // A line is of 32 tokens, of 16 by 2 channels, or of 2 by 16.
    const int half = rotation_.neox ? rotation_.dim / 2 : rotation_.dim;
    const bool whole_pairs = half % 2 == 0 && rotation_.first % 2 == 0;
    by_lanes_ = kHasLanes && strides_.token_tile == tile &&
                (tile == kTile ? strides_.token_lo == 1
                               : has_key_lines(strides_) && whole_pairs);
    by_token_pairs_ = kHasLanes && !rotation_.dim && has_value_lines(strides_);
  }

  bool operator<(const HeadMover& other) const { return at_[0] < other.at_[0]; }

  // A stretch, from pages to pages; both begin with block 0.
  void move(const Stretch& stretch, const Lanes& lanes, const Code<Format>* read,
            Code<Format>* pages, const float* cos, const float* sin) const {
    const Span& first = stretch.first;
    if constexpr (kHasLanes) {
      if (by_lanes_) {
        const auto tile = [&](auto* memory, int64_t page, int token) {
          return memory + page + token / tile_ * strides_.token_hi;
        };
        const Span& second = stretch.second.length ? stretch.second : first;
        by_lanes(lanes, tile(read, first.source, first.from),
                 tile(read, second.source, second.from), tile(pages, first.target, first.to), cos,
                 sin);
        return;
      }
      if (by_token_pairs_) {
        for (const Span* span : {&first, &stretch.second})
          by_token_pairs(read + span->source, span->from, pages + span->target, span->to,
                         span->length);
        return;
      }
    }
    if (dense_) {
      for (const Span* span : {&first, &stretch.second})
        copy_past_caches(pages + span->target + at_[0] + span->to * strides_.channels,
                         read + span->source + at_[0] + span->from * strides_.channels,
                         sizeof(Code<Format>) * strides_.channels * span->length);
      return;
    }
    for (const Span& span : {first, stretch.second})
      move(read + span.source, span.from, pages + span.target, span.to, span.length, cos, sin);
  }

 private:
#if defined(__AVX512BW__)
  static constexpr bool kHasLanes = std::is_same_v<Format, BFloat16>;
#else
  static constexpr bool kHasLanes = false;
#endif

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

  template <class AnyLanes>
  void by_lanes(const AnyLanes& lanes, const Code<Format>* first, const Code<Format>* second,
                Code<Format>* to, const float* cos, const float* sin) const {
#if defined(__AVX512BW__)
    const int width = kElements / tile_;  // channels of a line
    for (int c = 0; c < strides_.channels; c += width) {
      if (rotation_.dim && c == rotation_.first) c += rotation_.dim;
      if (c >= strides_.channels) break;
      lanes.store(to + at_[c], lanes.gather(first + at_[c], second + at_[c]));
    }
    if (width == 2 && !rotation_.neox) {
      for (int pair = 0; pair < rotation_.dim / 2; ++pair) {
        const int both = at_[rotation_.first + 2 * pair];
        const __m512i pairs = lanes.gather(first + both, second + both);
        lanes.store(to + both, turn_neighbours<Format>(pairs, Turn(cos, sin, pair)));
      }
      return;
    }
    for (int pair = 0; pair < rotation_.dim / 2; pair += width) {
      const Pair channels(rotation_, pair);
      const int one = at_[channels.first], other = at_[channels.second];
      __m512i x = lanes.gather(first + one, second + one);
      __m512i y = lanes.gather(first + other, second + other);
      turn_lanes<Format>(x, y, Turn(cos, sin, pair), Turn(cos, sin, pair + width - 1));
      lanes.store(to + one, x);
      lanes.store(to + other, y);
    }
#endif
  }

  void by_token_pairs(const Code<Format>* source, int from, Code<Format>* target, int to,
                      int count) const {
#if defined(__AVX512BW__)
    if (!count) return;
    const int step = strides_.token_hi;
    for (int c = 0; c < strides_.channels; c += strides_.channel_tile) {
      const Code<Format>* s = source + at_[c] + from / 2 * step;
      Code<Format>* t = target + at_[c] + to / 2 * step;
      if ((from ^ to) & 1)
        copy_token_pairs<false>(s, t, count, step, to & 1);
      else
        copy_token_pairs<true>(s, t, count, step, to & 1);
    }
#endif
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
      const Pair channels(rotation_, pair);
      const int first = at_[channels.first], second = at_[channels.second];
      turn_tokens<Format>(s + first, s + second, t + first, t + second, count, step, cos[pair],
                          sin[pair]);
    }
  }

  void by_channels(const Code<Format>* s, Code<Format>* t, int count, const float* cos,
                   const float* sin) const {
    const int channels = strides_.channels, step = strides_.token_lo;
    if (unit_channels_ && !rotation_.dim) {
      for (int i = 0; i < count; ++i)
        copy_past_caches(t + at_[0] + i * step, s + at_[0] + i * step,
                         sizeof(Code<Format>) * channels);
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
        const Pair pair(rotation_, p);
        const int first = at_[pair.first], second = at_[pair.second];
        turn_tokens<Format>(s + first, s + second, t + first, t + second, 1, 1, cos[p], sin[p]);
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

  TiledStrides strides_;
  Rotation rotation_;
  int tile_;
  std::vector<int32_t> at_;
  bool by_tokens_, unit_channels_, by_lanes_, by_token_pairs_;
  bool dense_;  // tokens of a head lie one behind the other, and only move
};

template <class Format>
void direct(const AlignArgs& args) {
  const int tile = tile_of(args);
  std::vector<HeadMover<Format>> movers;
  for (int p = 0; p < args.num_parts; ++p)
    for (int h = 0; h < args.parts[p].strides.heads; ++h) movers.emplace_back(args.parts[p], h, tile);
  // A page from its beginning to its end.
  std::sort(movers.begin(), movers.end());
  const std::vector<Stretch> stretches = paired(args, tile);
  std::vector<Lanes> lanes;
  for (const Stretch& stretch : stretches) lanes.emplace_back(stretch.first, stretch.second, tile);
  int64_t ahead = 0;  // elements to fetch before their turn: a page, but not more than L1 holds
  for (int p = 0; p < args.num_parts; ++p)
    ahead += args.block_size * args.parts[p].strides.heads * args.parts[p].strides.channels;
  ahead = std::min<int64_t>(ahead, 16384 / sizeof(Code<Format>));
  const auto count = static_cast<int64_t>(stretches.size());
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t layer = 0; layer < args.layers; ++layer) {
      for (int64_t i = 0; i < count; ++i) {
        const Stretch& stretch = stretches[i];
        const auto* read = static_cast<const Code<Format>*>(args.read[layer]);
        if (i + 1 < count) {
          const Stretch& next = stretches[i + 1];
          const int64_t page = (next.second.length ? next.second : next.first).source;
          if (page != (stretch.second.length ? stretch.second : stretch.first).source)
            fetch(read + page, ahead * sizeof(*read));
        }
        for (const auto& mover : movers)
          mover.move(stretch, lanes[i], read, static_cast<Code<Format>*>(args.pages[layer]),
                     args.cos + stretch.angle, args.sin + stretch.angle);
      }
    }
    finish_copies();
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
  const std::vector<Run> runs = runs_of(args);
  const auto elements = [&](const Run& run, auto&& visit) {
    Code<Format>* aside = scratch + run.before * width;
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
      for (size_t r = 0; r < runs.size(); ++r) {
        const Run& run = runs[r];
        const auto* source = pages + run.source / block * args.page_stride;
        const int offset = static_cast<int>(run.source % block);
        const int length = static_cast<int>(run.length);
        const float* cos = args.cos + run.angle * pairs;
        const float* sin = args.sin + run.angle * pairs;
        elements(run,
                 [&](const TiledStrides& strides, int h, int c, Code<Format>* aside) {
                   for (int i = 0; i < length; ++i)
                     aside[i] = source[strides.address(h, offset + i, c)];
                 });
        // The rows of a pair's channels, put aside, are vectors of tokens.
        Code<Format>* head = scratch + run.before * width;
        for (int p = 0; p < args.num_parts; ++p) {
          const Part& part = args.parts[p];
          const int half = part.rotation.dim / 2;
          for (int h = 0; h < part.strides.heads; ++h, head += part.strides.channels * run.length) {
            for (int pair = 0; pair < half; ++pair) {
              const Pair channels(part.rotation, pair);
              Code<Format>* a = head + channels.first * run.length;
              Code<Format>* b = head + channels.second * run.length;
              turn_tokens<Format>(a, b, a, b, length, 1, cos[pair], sin[pair]);
            }
          }
        }
      }
#pragma omp for schedule(static)
      for (size_t r = 0; r < runs.size(); ++r) {
        const Run& run = runs[r];
        auto* target = pages + run.target / block * args.page_stride;
        const int offset = static_cast<int>(run.target % block);
        elements(run,
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

void segreuse_sizes(int64_t* sizes) {
  sizes[0] = sizeof(segreuse::cpu::AlignArgs);
  sizes[1] = sizeof(segreuse::cpu::AttentionArgs);
  sizes[2] = sizeof(segreuse::cpu::ScoreArgs);
  sizes[3] = sizeof(segreuse::cpu::StoreArgs);
  sizes[4] = sizeof(segreuse::cpu::EncodeArgs);
  sizes[5] = sizeof(segreuse::cpu::CarryArgs);
}

void segreuse_align(const segreuse::cpu::AlignArgs* args) {
  using namespace segreuse;
  using cpu::DType;
  if (args->codec != cpu::CodecId::kRaw) return cpu::align_encoded(*args);
  switch (args->dtype) {
    case DType::kFloat32: return cpu::align<Float32>(*args);
    case DType::kBFloat16: return cpu::align<BFloat16>(*args);
    case DType::kFloat16: return cpu::align<Float16>(*args);
    case DType::kFloat8E4M3: return cpu::align<Float8E4M3>(*args);
    case DType::kFloat8E5M2: return cpu::align<Float8E5M2>(*args);
  }
}
