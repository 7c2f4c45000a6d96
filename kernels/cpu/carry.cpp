// SPDX-License-Identifier: Apache-2.0
// Add to cached tokens a share of what has changed of others (vllm_segreuse/kernels/reference.py,
// `carry`). Bit for bit what the reference computes: compile with -ffp-contract=off.
//
// Work is shared out by run of tokens that take part in the change of one and the same. Their
// distances from it follow one another, so in pages that keep a channel's tokens side by side the
// angles of a pair are a vector of the transposed tables, as the shares are of theirs.

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/runs.h"

namespace segreuse::cpu {
namespace {

// Tokens that follow one another in a page, and whose distances from one changed token do.
struct Taking {
  int64_t token, page;  // the first; the first element of its page
  int64_t row, distance;
  int offset, length;
};

std::vector<Taking> takings(const CarryArgs& args) {
  std::vector<Taking> found;
  for (int64_t i = 0; i < args.tokens; ++i) {
    if (args.rows[i] < 0) continue;
    const int64_t slot = args.slots[i];
    if (!found.empty()) {
      Taking& last = found.back();
      const int64_t before = last.token + last.length - 1;
      if (i == before + 1 && args.rows[i] == last.row && slot == args.slots[before] + 1 &&
          slot % args.block_size && args.distances[i] == args.distances[before] + 1) {
        ++last.length;
        continue;
      }
    }
    found.push_back({i, slot / args.block_size * args.page_stride, args.rows[i], args.distances[i],
                     static_cast<int>(slot % args.block_size), 1});
  }
  return found;
}

template <class Format>
inline void add(Code<Format>& code, float share, float change) {
  code = Format::encode(Format::decode(code) + change * share);
}

// One head of one half of a page.
template <class Format>
class Taker {
 public:
  // `changes`: of the head, `[rows, channels]`.
  Taker(const CarryArgs& args, int part, int head, float* changes)
      : args_(args), strides_(args.parts[part].strides), rotation_(args.parts[part].rotation),
        before_(static_cast<const Code<Format>*>(args.before[part]) +
                int64_t{head} * strides_.channels),
        changes_(changes), shares_(args.shares + part * args.tokens) {
    for (int c = 0; c < strides_.channels; ++c) at_.push_back(strides_.of_channel(head, c));
    by_tokens_ = strides_.token_tile >= 8 && strides_.token_lo < strides_.channels;
  }

  void compare(int64_t row, const Code<Format>* pages) const {
    const int64_t slot = args_.changed[row];
    const Code<Format>* now = pages + slot / args_.block_size * args_.page_stride +
                              strides_.of_token(static_cast<int32_t>(slot % args_.block_size));
    const Code<Format>* before = before_ + row * strides_.heads * strides_.channels;
    float* change = changes_ + row * strides_.channels;
    for (int c = 0; c < strides_.channels; ++c)
      change[c] = Format::decode(now[at_[c]]) - Format::decode(before[c]);
  }

  void take(const Taking& taking, Code<Format>* pages) const {
    const float* change = changes_ + taking.row * strides_.channels;
    int offset = taking.offset;
    for (int done = 0; done < taking.length;) {
      const int tile = strides_.token_tile;
      const int count = std::min(taking.length - done, tile - offset % tile);
      Code<Format>* to = pages + taking.page + strides_.of_token(offset);
      const float* shares = shares_ + taking.token + done;
      if (by_tokens_)
        by_tokens(change, to, taking.distance + done, shares, count);
      else
        by_channels(change, to, taking.distance + done, shares, count);
      done += count, offset += count;
    }
  }

 private:
  bool turns(int channel) const {
    return channel >= rotation_.first && channel < rotation_.first + rotation_.dim;
  }

  void by_tokens(const float* change, Code<Format>* to, int64_t distance, const float* shares,
                 int count) const {
    const int step = strides_.token_lo;
    for (int c = 0; c < strides_.channels; ++c) {
      if (turns(c)) continue;
      Code<Format>* channel = to + at_[c];
      for (int i = 0; i < count; ++i) add<Format>(channel[i * step], shares[i], change[c]);
    }
    for (int p = 0; p < rotation_.dim / 2; ++p) {
      const Pair pair(rotation_, p);
      const float a = change[pair.first], b = change[pair.second];
      const float* cos = args_.cos_by_pair + p * args_.num_distances + distance;
      const float* sin = args_.sin_by_pair + p * args_.num_distances + distance;
      Code<Format>* first = to + at_[pair.first];
      Code<Format>* second = to + at_[pair.second];
      for (int i = 0; i < count; ++i) {
        float x = a, y = b;
        turn(x, y, cos[i], sin[i]);
        add<Format>(first[i * step], shares[i], x);
        add<Format>(second[i * step], shares[i], y);
      }
    }
  }

  void by_channels(const float* change, Code<Format>* to, int64_t distance, const float* shares,
                   int count) const {
    const bool unit = strides_.channel_lo == 1 && strides_.channel_tile == strides_.channels;
    const int step = strides_.token_lo, half = rotation_.dim / 2;
    for (int i = 0; i < count; ++i, to += step, ++distance) {
      const float share = shares[i];
      const float* cos = args_.cos + distance * half;
      const float* sin = args_.sin + distance * half;
      if (unit && !half) {
        Code<Format>* channel = to + at_[0];
        for (int c = 0; c < strides_.channels; ++c) add<Format>(channel[c], share, change[c]);
        continue;
      }
      for (int c = 0; c < strides_.channels; ++c)
        if (!turns(c)) add<Format>(to[at_[c]], share, change[c]);
      if (unit && rotation_.neox) {
        Code<Format>* channel = to + at_[rotation_.first];
        const float* turning = change + rotation_.first;
        for (int p = 0; p < half; ++p) {
          float x = turning[p], y = turning[half + p];
          turn(x, y, cos[p], sin[p]);
          add<Format>(channel[p], share, x);
          add<Format>(channel[half + p], share, y);
        }
        continue;
      }
      for (int p = 0; p < half; ++p) {
        const Pair pair(rotation_, p);
        float x = change[pair.first], y = change[pair.second];
        turn(x, y, cos[p], sin[p]);
        add<Format>(to[at_[pair.first]], share, x);
        add<Format>(to[at_[pair.second]], share, y);
      }
    }
  }

  const CarryArgs& args_;
  TiledStrides strides_;
  Rotation rotation_;
  const Code<Format>* before_;
  float* changes_;
  const float* shares_;
  std::vector<int32_t> at_;
  bool by_tokens_;
};

template <class Format>
void carry(const CarryArgs& args) {
  int64_t width = 0;
  for (int p = 0; p < args.num_parts; ++p)
    width += int64_t{args.parts[p].strides.heads} * args.parts[p].strides.channels;
  std::vector<float> changes(args.num_rows * width);
  std::vector<Taker<Format>> takers;
  float* free = changes.data();
  for (int p = 0; p < args.num_parts; ++p) {
    const TiledStrides& strides = args.parts[p].strides;
    for (int h = 0; h < strides.heads; ++h, free += args.num_rows * strides.channels)
      takers.emplace_back(args, p, h, free);
  }
  const std::vector<Taking> found = takings(args);
  auto* pages = static_cast<Code<Format>*>(args.pages);
  const auto count = static_cast<int64_t>(found.size());
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < args.num_rows; ++row)
      for (const auto& taker : takers) taker.compare(row, pages);
#pragma omp for schedule(dynamic, 16)
    for (int64_t i = 0; i < count; ++i)
      for (const auto& taker : takers) taker.take(found[i], pages);
  }
}

}  // namespace
}  // namespace segreuse::cpu

void segreuse_carry(const segreuse::cpu::CarryArgs* args) {
  using namespace segreuse;
  using cpu::DType;
  switch (args->dtype) {
    case DType::kFloat32: return cpu::carry<Float32>(*args);
    case DType::kBFloat16: return cpu::carry<BFloat16>(*args);
    case DType::kFloat16: return cpu::carry<Float16>(*args);
    case DType::kFloat8E4M3: return cpu::carry<Float8E4M3>(*args);
    case DType::kFloat8E5M2: return cpu::carry<Float8E5M2>(*args);
  }
}
