// SPDX-License-Identifier: Apache-2.0
// Pages as scales and codes of one byte (vllm_segreuse/kernels/reference_codecs.py), and `align` of such pages.
// Bit for bit what the references compute: compile with -ffp-contract=off.
//
// Elements that lie side by side are tokens of a channel, in pages that are tiled as by vLLM's CPU
// backend, otherwise channels of a token. Lines of bfloat16 are converted by vectors (codes.h); of
// other types, loops have no branches, so that the compiler makes vectors of them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/codes.h"
#include "cpu/kernels.h"
#include "cpu/past_caches.h"
#include "cpu/runs.h"

namespace segreuse::cpu {
namespace {

// Of a float16 that is finite and not negative: in the place of a float32's bits it is too small by
// the difference of the biases.
inline float scale_of(uint16_t code) { return float_of(uint32_t{code} << 13) * 0x1p112f; }

inline float scale_at(const uint8_t* scales, int64_t index) {
  uint16_t code;
  std::memcpy(&code, scales + 2 * index, sizeof code);
  return scale_of(code);
}

// Codes times scales. Bytes may be anything's, so that the compiler has to be told what they are not.
template <class Codec>
inline void decode_codes(float* __restrict to, const uint8_t* __restrict codes, int count,
                         float scale) {
  for (int i = 0; i < count; ++i) to[i] = Codec::decode(codes[i]) * scale;
}

template <class Codec>
inline void decode_codes(float* __restrict to, const uint8_t* __restrict codes, int count,
                         const float* __restrict scales) {
  for (int i = 0; i < count; ++i) to[i] = Codec::decode(codes[i]) * scales[i];
}

template <class Codec>
inline void encode_codes(uint8_t* __restrict to, const float* __restrict numbers, int count,
                         float reciprocal) {
  for (int i = 0; i < count; ++i) to[i] = Codec::encode(numbers[i] * reciprocal);
}

template <class Codec>
inline void encode_codes(uint8_t* __restrict to, const float* __restrict numbers, int count,
                         const float* __restrict reciprocals) {
  for (int i = 0; i < count; ++i) to[i] = Codec::encode(numbers[i] * reciprocals[i]);
}

// Where one head of keys or values lies in pages, and in encoded ones.
struct Head {
  const TiledStrides& strides;
  const Rotation& rotation;
  bool by_channel;            // scales are of channels (keys), not of tokens (values)
  int64_t scales, codes;      // first bytes in an encoded page
  std::vector<int32_t> at;    // of each channel
  bool tiled, dense, tokens;  // kTile tokens of a channel lie side by side; all channels of a token do; tokens do
  bool lines;                 // of one scale each, in runs of whole vectors
  bool within = false;        // a tile may be read up to a tile too early or too late

  Head(const Part* parts, int part, int head, int64_t value_scales, int64_t codes)
      : strides(parts[part].strides),
        rotation(parts[part].rotation),
        by_channel(part == 0),
        scales(part == 0 ? 2 * int64_t{head} * strides.channels
                         : value_scales + 2 * int64_t{head} * strides.block_size),
        codes(codes) {
    for (int c = 0; c < strides.channels; ++c) at.push_back(strides.of_channel(head, c));
    tokens = strides.token_lo == 1 && strides.token_tile >= 8;
    tiled = by_channel && strides.token_lo == 1 && strides.token_tile == kTile;
    dense = strides.channel_lo == 1 && strides.channel_tile == strides.channels;
    lines = by_channel ? tokens && strides.token_tile % kCodes == 0
                       : dense && strides.channels % kCodes == 0;
  }

  // The last tile's first element.
  int64_t last() const {
    return *std::max_element(at.begin(), at.end()) +
           strides.of_token(strides.block_size - strides.token_tile);
  }
};

// Elements of the keys and values of a page.
int64_t elements_of(const Part* parts) {
  int64_t elements = 0;
  for (int p = 0; p < 2; ++p)
    elements += int64_t{parts[p].strides.heads} * parts[p].strides.block_size *
                parts[p].strides.channels;
  return elements;
}

std::vector<Head> heads_of(const Part* parts, int64_t value_scales, int64_t codes) {
  std::vector<Head> heads;
  for (int p = 0; p < 2; ++p)
    for (int h = 0; h < parts[p].strides.heads; ++h)
      heads.emplace_back(parts, p, h, value_scales, codes);
  // In front of the codes are scales; behind those of the keys are, as a rule, those of the values.
  for (Head& head : heads)
    head.within = codes >= kTile && head.last() + 2 * kTile <= elements_of(parts);
  return heads;
}

// Moves one head of a stretch from encoded pages, decoded and turned.
template <class Format, class Codec>
class Decoder {
 public:
  // Memory of one thread, for heads of so many channels.
  explicit Decoder(int channels) : scale_(2 * channels), row_(channels), out_(channels) {}

  void move(const Head& head, const Stretch& stretch, const uint8_t* read, Code<Format>* pages,
            const float* cos, const float* sin) {
    if constexpr (std::is_same_v<Format, BFloat16>) {
      if (head.tiled && head.within)
        return stretch.second.length ? move_lanes<true>(head, stretch, read, pages, cos, sin)
                                     : move_lanes<false>(head, stretch, read, pages, cos, sin);
      if (head.lines && !head.by_channel) {
        for (const Span* span : {&stretch.first, &stretch.second})
          move_rows(head, *span, read, pages);
        return;
      }
    }
    if (head.tiled)
      move_tile(head, stretch, read, pages, cos, sin);
    else
      for (const Span* span : {&stretch.first, &stretch.second})
        move_tokens(head, *span, read, pages, cos, sin);
  }

 private:
  // Lanes of a tile, with room for tiles that are shifted to both sides.
  struct Lanes {
    float values[3 * kTile] = {};
    float* begin() { return values + kTile; }
  };

  void move_tile(const Head& head, const Stretch& stretch, const uint8_t* read,
                 Code<Format>* pages, const float* cos, const float* sin) {
    const TiledStrides& strides = head.strides;
    const Span* spans[] = {&stretch.first, &stretch.second};
    const uint8_t* codes[2];
    const float* scale[2];
    for (int s = 0; s < 2 && spans[s]->length; ++s) {
      const uint8_t* page = read + spans[s]->source;
      codes[s] = page + head.codes + spans[s]->from / kTile * strides.token_hi;
      scale[s] = read_scales(page + head.scales, strides.channels, s);
    }
    const int first = spans[0]->to % kTile, length = spans[0]->length + spans[1]->length;
    Code<Format>* target = pages + spans[0]->target + spans[0]->to / kTile * strides.token_hi;
    // The first span's tile is read whole; so is the second's where no lane of the first is behind it.
    const bool whole = spans[1]->from % kTile == 0;
    const auto load = [&](Lanes& lanes, int c) {
      for (int s = 0; s < 2; ++s) {
        const Span& span = *spans[s];
        if (s == 1 && !span.length) break;
        const int shift = span.to % kTile - span.from % kTile;
        const uint8_t* from = codes[s] + head.at[c];
        float* to = lanes.begin() + shift;
        const float factor = scale[s][c];
        const int begin = span.from % kTile;
        if (s == 0 || whole)
          decode_codes<Codec>(to, from, kTile, factor);
        else
          decode_codes<Codec>(to + begin, from + begin, span.length, factor);
      }
    };
    const auto store = [&](Lanes& lanes, int c) {
      alignas(64) Code<Format> out[kTile];
      for (int i = 0; i < kTile; ++i) out[i] = Format::encode(lanes.begin()[i]);
      copy_past_caches(target + head.at[c] + first, out + first, sizeof(out[0]) * length);
    };
    Lanes a, b;
    const Rotation& rotation = head.rotation;
    for (int c = 0; c < strides.channels; ++c) {
      if (rotation.dim && c == rotation.first) c += rotation.dim;
      if (c >= strides.channels) break;
      load(a, c);
      store(a, c);
    }
    for (int p = 0; p < rotation.dim / 2; ++p) {
      const Pair pair(rotation, p);
      load(a, pair.first);
      load(b, pair.second);
      for (int i = 0; i < kTile; ++i) turn(a.begin()[i], b.begin()[i], cos[p], sin[p]);
      store(a, pair.first);
      store(b, pair.second);
    }
  }

  // One tile of a target page, from one tile or two. Both are read at their place in the target:
  // what lies beside a tile is read, too, and not used.
  template <bool kTwo>
  void move_lanes(const Head& head, const Stretch& stretch, const uint8_t* read, uint16_t* pages,
                  const float* cos, const float* sin) {
    constexpr int kSteps = kTile / kCodes;
    const TiledStrides& strides = head.strides;
    const Span* spans[] = {&stretch.first, &stretch.second};
    const uint8_t* codes[2] = {};
    const float* scale[2] = {};
    for (int s = 0; s < 1 + kTwo; ++s) {
      const uint8_t* page = read + spans[s]->source;
      const int shift = spans[s]->to % kTile - spans[s]->from % kTile;
      codes[s] = page + head.codes + spans[s]->from / kTile * strides.token_hi - shift;
      scale[s] = read_scales(page + head.scales, strides.channels, s, 1 / Codec::kFactor);
    }
    const int first = spans[0]->to % kTile, begin = kTwo ? spans[1]->to % kTile : kTile;
    const int length = spans[0]->length + (kTwo ? spans[1]->length : 0);
    Shorts bytes[kSteps];    // of the second tile, all bits
    Ints even[kSteps], odd[kSteps];
    for (int i = 0; kTwo && i < kTile; ++i) {
      const int step = i / kCodes, lane = i % kCodes / 2;
      const int taken = i >= begin ? -1 : 0;
      (i % 2 ? odd : even)[step][lane] = taken;
      bytes[step][lane] = static_cast<uint16_t>(
          i % 2 ? (bytes[step][lane] & 0xff) | (taken & 0xff00) : taken & 0xff);
    }
    const auto load = [&](int c, int step) {
      const int64_t at = head.at[c] + step * kCodes;
      Shorts taken = load_as<Shorts>(codes[0] + at);
      const Floats factor = Floats{} + scale[0][c];
      Halves found;
      if constexpr (kTwo) {
        const Shorts other = load_as<Shorts>(codes[1] + at);
        taken = (taken & ~bytes[step]) | (other & bytes[step]);
        const Floats others = Floats{} + scale[1][c];
        found = Codec::decode(taken);
        found.even *= select(even[step], others, factor);
        found.odd *= select(odd[step], others, factor);
      } else {
        found = Codec::decode(taken);
        found.even *= factor;
        found.odd *= factor;
      }
      return found;
    };
    uint16_t* target = pages + spans[0]->target + spans[0]->to / kTile * strides.token_hi;
    const auto write = [&](int c, const Words* words) {
      uint16_t* to = target + head.at[c];
      if (length == kTile)
        copy_past_caches(to, words, kTile * sizeof *to);
      else
        std::memcpy(to + first, reinterpret_cast<const uint16_t*>(words) + first,
                    length * sizeof *to);
    };
    const Rotation& rotation = head.rotation;
    for (int c = 0; c < strides.channels; ++c) {
      if (rotation.dim && c == rotation.first) c += rotation.dim;
      if (c >= strides.channels) break;
      Words words[kSteps];
      for (int step = 0; step < kSteps; ++step) words[step] = joined(load(c, step));
      write(c, words);
    }
    for (int p = 0; p < rotation.dim / 2; ++p) {
      const Pair pair(rotation, p);
      const Floats c = Floats{} + cos[p], s = Floats{} + sin[p];
      Words one[kSteps], other[kSteps];
      for (int step = 0; step < kSteps; ++step) {
        const Halves x = load(pair.first, step), y = load(pair.second, step);
        one[step] = joined({x.even * c - y.even * s, x.odd * c - y.odd * s});
        other[step] = joined({y.even * c + x.even * s, y.odd * c + x.odd * s});
      }
      write(pair.first, one);
      write(pair.second, other);
    }
  }

  // Channels of a token lie side by side, and have one scale.
  void move_rows(const Head& head, const Span& span, const uint8_t* read, uint16_t* pages) {
    const TiledStrides& strides = head.strides;
    const uint8_t* page = read + span.source;
    for (int i = 0; i < span.length; ++i) {
      const int token = span.from + i;
      const uint8_t* from = page + head.codes + strides.of_token(token) + head.at[0];
      uint16_t* to = pages + span.target + strides.of_token(span.to + i) + head.at[0];
      const Floats scale =
          Floats{} + scale_at(page + head.scales, token) * (1 / Codec::kFactor);
      for (int c = 0; c < strides.channels; c += kCodes) {
        Halves found = Codec::decode(load_as<Shorts>(from + c));
        found.even *= scale;
        found.odd *= scale;
        const Words words = joined(found);
        std::memcpy(to + c, &words, sizeof words);
      }
    }
  }

  void move_tokens(const Head& head, const Span& span, const uint8_t* read, Code<Format>* pages,
                   const float* cos, const float* sin) {
    if (!span.length) return;
    const TiledStrides& strides = head.strides;
    const uint8_t* page = read + span.source;
    const float* scales = head.by_channel
                              ? read_scales(page + head.scales, strides.channels, 0)
                              : nullptr;
    for (int i = 0; i < span.length; ++i) {
      const int token = span.from + i;
      const uint8_t* from = page + head.codes + strides.of_token(token);
      const float scale = scales ? 0.0f : scale_at(page + head.scales, token);
      decode_row(head, from, scales, scale);
      turn_row(head.rotation, cos, sin);
      encode_row(head, pages + span.target + strides.of_token(span.to + i));
    }
  }

  void decode_row(const Head& head, const uint8_t* from, const float* scales, float scale) {
    const int channels = head.strides.channels;
    float* row = row_.data();
    const uint8_t* dense = from + head.at[0];
    const int32_t* at = head.at.data();
    if (head.dense && scales)
      decode_codes<Codec>(row, dense, channels, scales);
    else if (head.dense)
      decode_codes<Codec>(row, dense, channels, scale);
    else
      for (int c = 0; c < channels; ++c)
        row[c] = Codec::decode(from[at[c]]) * (scales ? scales[c] : scale);
  }

  void turn_row(const Rotation& rotation, const float* cos, const float* sin) {
    float* row = row_.data() + rotation.first;
    const int half = rotation.dim / 2;
    if (rotation.neox)
      for (int p = 0; p < half; ++p) turn(row[p], row[half + p], cos[p], sin[p]);
    else
      for (int p = 0; p < half; ++p) turn(row[2 * p], row[2 * p + 1], cos[p], sin[p]);
  }

  void encode_row(const Head& head, Code<Format>* to) {
    const int channels = head.strides.channels;
    const float* row = row_.data();
    Code<Format>* out = out_.data();
    for (int c = 0; c < channels; ++c) out[c] = Format::encode(row[c]);
    if (head.dense)
      copy_past_caches(to + head.at[0], out, sizeof(out[0]) * channels);
    else
      for (int c = 0; c < channels; ++c) to[head.at[c]] = out[c];
  }

  // Those of all channels, in one of two places, times a power of two.
  const float* read_scales(const uint8_t* scales, int channels, int place, float factor = 1.0f) {
    float* __restrict to = scale_.data() + place * channels;
    const auto* __restrict codes = reinterpret_cast<const uint16_t*>(scales);
    for (int c = 0; c < channels; ++c) to[c] = scale_of(codes[c]) * factor;
    return to;
  }

  std::vector<float> scale_, row_;
  std::vector<Code<Format>> out_;
};

int most_channels(const Part* parts) {
  return std::max(parts[0].strides.channels, parts[1].strides.channels);
}

template <class Format, class Codec>
void decode(const AlignArgs& args) {
  const std::vector<Head> heads = heads_of(args.parts, args.value_scales, args.codes);
  const std::vector<Stretch> stretches = paired(args);
  const auto count = static_cast<int64_t>(stretches.size());
  const int64_t ahead = std::min<int64_t>(args.codes + elements_of(args.parts), 16384);
#pragma omp parallel
  {
    Decoder<Format, Codec> decoder(most_channels(args.parts));
#pragma omp for collapse(2) schedule(static)
    for (int64_t layer = 0; layer < args.layers; ++layer) {
      for (int64_t i = 0; i < count; ++i) {
        const auto* read = static_cast<const uint8_t*>(args.read[layer]);
        if (i + 1 < count) {
          const Stretch& next = stretches[i + 1];
          fetch(read + (next.second.length ? next.second : next.first).source, ahead);
        }
        for (const Head& head : heads)
          decoder.move(head, stretches[i], read, static_cast<Code<Format>*>(args.pages[layer]),
                       args.cos + stretches[i].angle, args.sin + stretches[i].angle);
      }
    }
    finish_copies();
  }
}

// Encodes one head of a page.
template <class Format, class Codec>
class Encoder {
 public:
  // Memory of one thread, for heads of so many elements.
  explicit Encoder(int64_t elements)
      : numbers_(elements), codes_(elements), largest_(elements), reciprocal_(elements) {}

  // Whether all numbers have a code; nothing is written if not.
  bool encode(const Head& head, const Code<Format>* page, uint8_t* cell) {
    const TiledStrides& strides = head.strides;
    if constexpr (std::is_same_v<Format, BFloat16>) {
      if (head.lines) return encode_lines(head, page, cell);
    }
    // Lines of elements that lie side by side: tokens of a channel, or channels of a token.
    const int lines = head.tokens ? strides.channels : strides.block_size;
    const int length = head.tokens ? strides.block_size : strides.channels;
    for (int l = 0; l < lines; ++l) {
      float* line = numbers_.data() + int64_t{l} * length;
      each_run(head, l, [&](int32_t at, int first, int count, int step) {
        const Code<Format>* from = page + at;
        if (step == 1)
          for (int i = 0; i < count; ++i) line[first + i] = Format::decode(from[i]);
        else
          for (int i = 0; i < count; ++i) line[first + i] = Format::decode(from[i * step]);
      });
    }
    const bool of_lines = head.tokens == head.by_channel;
    const int scales = of_lines ? lines : length;
    find_largest(lines, length, of_lines);
    if (!find_scales(scales, cell + head.scales)) return false;
    for (int l = 0; l < lines; ++l) {
      const float* line = numbers_.data() + int64_t{l} * length;
      const float* reciprocal = reciprocal_.data();
      uint8_t* codes = codes_.data();
      if (of_lines)
        encode_codes<Codec>(codes, line, length, reciprocal[l]);
      else
        encode_codes<Codec>(codes, line, length, reciprocal);
      each_run(head, l, [&](int32_t at, int first, int count, int step) {
        uint8_t* to = cell + head.codes + at;
        if (step == 1)
          std::memcpy(to, codes + first, count);
        else
          for (int i = 0; i < count; ++i) to[i * step] = codes[first + i];
      });
    }
    return true;
  }

 private:
  // Calls `visit(element of the page, place in the line, count, step)` for what lies regularly.
  template <class Visit>
  static void each_run(const Head& head, int line, Visit&& visit) {
    const TiledStrides& strides = head.strides;
    if (head.tokens) {
      for (int token = 0; token < strides.block_size; token += strides.token_tile)
        visit(head.at[line] + strides.of_token(token), token, strides.token_tile, 1);
    } else {
      const int32_t token = strides.of_token(line);
      for (int c = 0; c < strides.channels; c += strides.channel_tile)
        visit(head.at[c] + token, c, strides.channel_tile, strides.channel_lo);
    }
  }

  // Lines of one scale each.
  bool encode_lines(const Head& head, const uint16_t* page, uint8_t* cell) {
    const TiledStrides& strides = head.strides;
    const int lines = head.by_channel ? strides.channels : strides.block_size;
    for (int l = 0; l < lines; ++l) {
      // Magnitudes as integers: these are in the same order, and NaN is above all.
      Words most{};
      each_run(head, l, [&](int32_t at, int, int count, int) {
        for (int i = 0; i < count; i += kCodes) {
          const Words pairs = load_as<Words>(page + at + i);
          const Words even = (pairs << 16) & 0x7fffffffu, odd = pairs & 0x7fff0000u;
          const Words both = (Ints)even > (Ints)odd ? even : odd;
          most = (Ints)both > (Ints)most ? both : most;
        }
      });
      uint32_t largest = 0;
      for (int i = 0; i < kLanes; ++i) largest = std::max<uint32_t>(largest, most[i]);
      largest_[l] = largest;
    }
    if (!find_scales(lines, cell + head.scales)) return false;
    for (int l = 0; l < lines; ++l) {
      const Floats reciprocal = Floats{} + reciprocal_[l];
      each_run(head, l, [&](int32_t at, int, int count, int) {
        for (int i = 0; i < count; i += kCodes) {
          const Halves found = widened(load_as<Words>(page + at + i));
          const Shorts codes = joined_codes(Codec::encode(found.even * reciprocal),
                                            Codec::encode(found.odd * reciprocal));
          std::memcpy(cell + head.codes + at + i, &codes, sizeof codes);
        }
      });
    }
    return true;
  }

  // Magnitudes as integers: these are in the same order, and NaN is above all.
  void find_largest(int lines, int length, bool of_lines) {
    uint32_t* largest = largest_.data();
    std::fill(largest, largest + (of_lines ? lines : length), 0u);
    for (int l = 0; l < lines; ++l) {
      const float* line = numbers_.data() + int64_t{l} * length;
      if (of_lines) {
        uint32_t most = 0;
        for (int i = 0; i < length; ++i) most = std::max(most, bits_of(line[i]) & 0x7fffffffu);
        largest[l] = most;
      } else {
        for (int i = 0; i < length; ++i)
          largest[i] = std::max(largest[i], bits_of(line[i]) & 0x7fffffffu);
      }
    }
  }

  bool find_scales(int count, uint8_t* to) {
    for (int i = 0; i < count; ++i) {
      const float wanted = float_of(largest_[i]) / Codec::kLargest;
      uint16_t code = Float16::encode(wanted);
      if (Float16::decode(code) < wanted) ++code;
      const float scale = Float16::decode(code);
      if (!(scale * Codec::kLargest <= kFinite)) return false;
      std::memcpy(to + 2 * i, &code, sizeof code);
      reciprocal_[i] = scale > 0 ? 1 / scale : 0;
    }
    return true;
  }

  static constexpr float kFinite =
      std::is_same_v<Format, Float16> ? 65504.0f : 0x1.fep127f;  // no scale is above bfloat16's

  std::vector<float> numbers_;
  std::vector<uint8_t> codes_;
  std::vector<uint32_t> largest_;
  std::vector<float> reciprocal_;
};

template <class Format, class Codec>
void encode(const EncodeArgs& args) {
  const std::vector<Head> heads = heads_of(args.parts, args.value_scales, args.codes);
  const int64_t elements = int64_t{most_channels(args.parts)} * args.parts[0].strides.block_size;
#pragma omp parallel
  {
    Encoder<Format, Codec> encoder(elements);
#pragma omp for collapse(2) schedule(static)
    for (int64_t i = 0; i < args.count; ++i) {
      for (int64_t layer = 0; layer < args.layers; ++layer) {
        const auto* page =
            static_cast<const Code<Format>*>(args.pages[layer]) + args.blocks[i] * args.page_stride;
        auto* cell = static_cast<uint8_t*>(args.cells[layer]) + args.rows[i] * args.cell_stride;
        for (const Head& head : heads) {
          if (encoder.encode(head, page, cell)) continue;
          __atomic_store_n(args.encoded + i, uint8_t{0}, __ATOMIC_RELAXED);
          break;
        }
      }
    }
  }
}

// Calls `run` with values of the types that the arguments name.
template <class Args, class Run>
void with_types(const Args& args, Run run) {
  const auto with_codec = [&](auto format) {
    if (args.codec == CodecId::kInt8)
      run(format, Int8{});
    else
      run(format, Fp8{});
  };
  switch (args.dtype) {
    case DType::kFloat32: return with_codec(Float32{});
    case DType::kBFloat16: return with_codec(BFloat16{});
    case DType::kFloat16: return with_codec(Float16{});
    default: return;  // fp8 is not encoded again
  }
}

}  // namespace

void align_encoded(const AlignArgs& args) {
  with_types(args, [&](auto format, auto codec) {
    decode<decltype(format), decltype(codec)>(args);
  });
}

}  // namespace segreuse::cpu

void segreuse_encode(const segreuse::cpu::EncodeArgs* args) {
  segreuse::cpu::with_types(*args, [&](auto format, auto codec) {
    segreuse::cpu::encode<decltype(format), decltype(codec)>(*args);
  });
}
