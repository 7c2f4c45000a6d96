// SPDX-License-Identifier: Apache-2.0
// Reads keys and values of one head from the pages of a request, chunk by chunk, in the order that
// products need.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace segreuse::cpu {

constexpr int kChunk = 128;  // keys per step of the online softmax

// Half-precision conversions that the compiler can vectorise, unlike the portable ones.
#if defined(__FLT16_MAX__)
struct NativeFloat16 {
  using Code = _Float16;
  static float decode(Code code) { return static_cast<float>(code); }
  static Code encode(float value) { return static_cast<Code>(value); }
};
#else
using NativeFloat16 = Float16;
#endif

// Reads one KV head of one request, by position.
template <class Format>
class HeadReader {
  using Code = typename Format::Code;

 public:
  HeadReader(const void* pages, int64_t page_stride, const int32_t* blocks,
             const TiledStrides& strides, int head)
      : pages_(static_cast<const Code*>(pages)),
        page_stride_(page_stride),
        blocks_(blocks),
        strides_(strides) {
    for (int c = 0; c < strides.channels; ++c) at_.push_back(strides.of_channel(head, c));
    unit_ = strides.channel_lo == 1 && strides.channel_tile == strides.channels;
  }

  // out[channel][kChunk]: channels of positions [first, first + count), the rest of a row 0.
  void by_channel(int64_t first, int count, float* out) const {
    if (count < kChunk) std::fill(out, out + strides_.channels * kChunk, 0.0f);
    tiles(first, count, [&](const Code* token, int done, int step) {
      if (unit_) {
        for (int i = 0; i < step; ++i, token += strides_.token_lo)
          for (int c = 0; c < strides_.channels; ++c)
            out[c * kChunk + done + i] = Format::decode(token[at_[0] + c]);
        return;
      }
      for (int c = 0; c < strides_.channels; ++c) {
        const Code* from = token + at_[c];
        float* to = out + c * kChunk + done;
        if (strides_.token_lo == 1)
          for (int i = 0; i < step; ++i) to[i] = Format::decode(from[i]);
        else
          for (int i = 0; i < step; ++i) to[i] = Format::decode(from[i * strides_.token_lo]);
      }
    });
  }

  // out[kChunk][channels]: the same, by token; tokens from `count` on 0.
  void by_token(int64_t first, int count, float* out) const {
    const int channels = strides_.channels;
    std::fill(out + count * channels, out + kChunk * channels, 0.0f);
    tiles(first, count, [&](const Code* token, int done, int step) {
      for (int i = 0; i < step; ++i, token += strides_.token_lo) {
        float* to = out + (done + i) * channels;
        if (unit_) {
          const Code* from = token + at_[0];
          for (int c = 0; c < channels; ++c) to[c] = Format::decode(from[c]);
        } else {
          for (int c = 0; c < channels; ++c) to[c] = Format::decode(token[at_[c]]);
        }
      }
    });
  }

  // tiles[16 keys each]: where [pairs of channels][16 keys][2] lie, undecoded: in the page itself, or
  // in `copy`, keys from `count` on 0.
  void key_tiles(int64_t first, int count, Code* copy, const Code** tiles_of_keys) const {
    const int channels = strides_.channels;
    const bool ready = has_key_lines(strides_) && strides_.channel_hi == 32;
    if (ready && count == kChunk) {
      for (int k = 0; k < kChunk / 16; ++k) tiles_of_keys[k] = token(first + k * 16) + at_[0];
      return;
    }
    for (int k = 0; k < kChunk / 16; ++k) tiles_of_keys[k] = copy + k * 16 * channels;
    if (count < kChunk) std::fill(copy, copy + channels * kChunk, Code{});
    tiles(first, count, [&](const Code* from, int done, int step) {
      for (int i = 0; i < step; ++i, from += strides_.token_lo) {
        const int key = done + i;
        Code* to = copy + key / 16 * 16 * channels + key % 16 * 2;
        for (int c = 0; c < channels; c += 2) {
          to[c * 16] = from[at_[c]];
          to[c * 16 + 1] = from[at_[c + 1]];
        }
      }
    });
  }

  // Lines of 2 keys by 16 channels, undecoded.
  struct ValueLines {
    const Code* of_keys[kChunk / 32];  // of 32 keys and the first 16 channels, one after the other
    int step;                          // to those of the next 16 channels
  };

  // In the page itself, or in `copy`, keys from `count` on 0.
  ValueLines value_lines(int64_t first, int count, Code* copy) const {
    const int channels = strides_.channels;
    const bool ready =
        has_value_lines(strides_) && strides_.token_hi == 32 && strides_.block_size % 32 == 0;
    ValueLines lines;
    if (ready && count == kChunk) {
      lines.step = strides_.channel_hi;
      for (int k = 0; k < kChunk / 32; ++k) lines.of_keys[k] = token(first + k * 32) + at_[0];
      return lines;
    }
    lines.step = 16 * 32;
    for (int k = 0; k < kChunk / 32; ++k) lines.of_keys[k] = copy + k * 32 * channels;
    if (count < kChunk) std::fill(copy, copy + channels * kChunk, Code{});
    tiles(first, count, [&](const Code* from, int done, int step) {
      for (int i = 0; i < step; ++i, from += strides_.token_lo) {
        const int key = done + i;
        Code* to = copy + key / 32 * 32 * channels + key % 32 / 2 * 32 + key % 2;
        for (int c = 0; c < channels; ++c) to[c / 16 * lines.step + c % 16 * 2] = from[at_[c]];
      }
    });
    return lines;
  }

 private:
  // Tokens that one stride steps through: visit(first one, how many come before it, how many).
  template <class Visit>
  void tiles(int64_t first, int count, Visit&& visit) const {
    for (int done = 0; done < count;) {
      const int64_t position = first + done;
      const int offset = static_cast<int>(position % strides_.block_size);
      const int step = std::min(count - done, strides_.token_tile - offset % strides_.token_tile);
      visit(token(position), done, step);
      done += step;
    }
  }

  // Where a position's token begins.
  const Code* token(int64_t position) const {
    const int64_t block = blocks_[position / strides_.block_size];
    const int offset = static_cast<int>(position % strides_.block_size);
    return pages_ + block * page_stride_ + strides_.of_token(offset);
  }

  const Code* pages_;
  int64_t page_stride_;
  const int32_t* blocks_;
  const TiledStrides& strides_;
  std::vector<int32_t> at_;
  bool unit_;
};

}  // namespace segreuse::cpu
