// SPDX-License-Identifier: Apache-2.0
// Attention of queries at scattered positions over a paged cache, and what attention each key
// receives (kernels/reference.py, `sparse_attention` and `token_scores`).
//
// Neighbouring queries of a request share a tile: its pages are unpacked to float32 once for all
// queries and heads that read them, and both products run as small matrix products in registers.
// Only chunks of keys that reach beyond a query's own position are masked.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace segreuse::cpu {
namespace {

constexpr int kChunk = 128;     // keys per step of the online softmax
constexpr int kTileRows = 108;  // queries times heads of a group
constexpr float kLog2E = 1.44269504f, kNever = -std::numeric_limits<float>::infinity();

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

 private:
  // Tokens that one stride steps through: visit(first one, how many come before it, how many).
  template <class Visit>
  void tiles(int64_t first, int count, Visit&& visit) const {
    for (int done = 0; done < count;) {
      const int64_t position = first + done;
      const int offset = static_cast<int>(position % strides_.block_size);
      const int step = std::min(count - done, strides_.token_tile - offset % strides_.token_tile);
      const int64_t block = blocks_[position / strides_.block_size];
      visit(pages_ + block * page_stride_ + strides_.of_token(offset), done, step);
      done += step;
    }
  }

  const Code* pages_;
  int64_t page_stride_;
  const int32_t* blocks_;
  const TiledStrides& strides_;
  std::vector<int32_t> at_;
  bool unit_;
};

// Queries of one request that are computed together, for one KV head.
struct Tile {
  int64_t first, count;
  int head;
};

int64_t queries_per_tile(int64_t group) { return std::max<int64_t>(1, kTileRows / group); }

// Rows [query, head of the group] of a tile, ready for base-2 softmax.
template <class Format>
void read_queries(const void* query, int64_t heads, int head_size, int group, const Tile& tile,
                  float scale, float* out) {
  const auto* codes = static_cast<const typename Format::Code*>(query);
  for (int64_t q = 0; q < tile.count; ++q) {
    const auto* from = codes + ((tile.first + q) * heads + int64_t{tile.head} * group) * head_size;
    for (int i = 0; i < group * head_size; ++i)
      *out++ = Format::decode(from[i]) * scale * kLog2E;
  }
}

// Hide what a row may not see of a chunk: the keys from `visible` on.
inline void hide(float* row, int visible) {
  for (int i = std::max(visible, 0); i < kChunk; ++i) row[i] = kNever;
}

// The online softmax of a tile's rows: peaks, and sums of weights, lane by lane.
class Softmax {
 public:
  explicit Softmax(int64_t rows) : peak_(rows), sums_(rows * kLanes) {}

  void reset() {
    std::fill(peak_.begin(), peak_.end(), kNever);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
  }

  // Logits of a chunk become weights. Returns what the row's earlier results are to be multiplied
  // by.
  float step(int64_t row, float* logits) {
    Floats high = load(logits);
    for (int i = kLanes; i < kChunk; i += kLanes) {
      const Floats next = load(logits + i);
      high = select(next > high, next, high);
    }
    const float before = peak_[row], after = std::max(before, largest(high));
    Floats weights{};
    for (int i = 0; i < kChunk; i += kLanes) {
      const Floats weight = power_of_two(load(logits + i) - after);
      store(logits + i, weight);
      weights += weight;
    }
    float* sums = &sums_[row * kLanes];
    if (before == after) {
      store(sums, load(sums) + weights);
      return 1.0f;
    }
    const float shrink = std::exp2(before - after);
    store(sums, load(sums) * shrink + weights);
    peak_[row] = after;
    return shrink;
  }

  float sum(int64_t row) const { return total(load(&sums_[row * kLanes])); }
  float peak(int64_t row) const { return peak_[row]; }

 private:
  std::vector<float> peak_, sums_;
};

// Walk a tile's keys: logits of every row that sees any of a chunk, masked.
// visit(first row, rows, first key, keys, logits).
template <class Format, class Visit>
void for_each_chunk(const HeadReader<Format>& keys, const int64_t* positions, int group,
                    int64_t count, int head_size, const float* queries, float* key_chunk,
                    float* logits, Visit&& visit) {
  const int64_t end = positions[count - 1] + 1;
  int64_t skipped = 0;
  for (int64_t first = 0; first < end; first += kChunk) {
    const int seen = static_cast<int>(std::min<int64_t>(kChunk, end - first));
    while (positions[skipped] < first) ++skipped;
    const int row = static_cast<int>(skipped) * group;
    const int rows = static_cast<int>(count) * group - row;
    keys.by_channel(first, seen, key_chunk);
    multiply<false>(queries + int64_t{row} * head_size, head_size, key_chunk, kChunk, head_size,
                    logits, kChunk, rows, kChunk);
    for (int r = 0; r < rows; ++r) {
      const int64_t position = positions[skipped + r / group];
      if (position >= first + kChunk - 1) break;  // so do all later rows
      hide(logits + r * kChunk, static_cast<int>(position - first) + 1);
    }
    visit(row, rows, first, seen, logits);
  }
}

template <class Format>
void attend(const AttentionArgs& args) {
  const int kv_heads = args.keys.heads, head_size = args.keys.channels;
  const int group = static_cast<int>(args.heads / kv_heads);
  std::vector<Tile> tiles;
  for (int64_t first = 0; first < args.queries;) {
    int64_t next = first;
    while (next < args.queries && next - first < queries_per_tile(group) &&
           args.request[next] == args.request[first])
      ++next;
    for (int head = 0; head < kv_heads; ++head) tiles.push_back({first, next - first, head});
    first = next;
  }
  // The longest first, so that no thread is left with one at the end.
  std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) {
    return args.positions[a.first + a.count - 1] > args.positions[b.first + b.count - 1];
  });
  const int64_t rows = queries_per_tile(group) * group;
#pragma omp parallel
  {
    std::vector<float> queries(rows * head_size), sums(rows * head_size), logits(rows * kChunk),
        key_chunk(head_size * kChunk), value_chunk(head_size * kChunk);
    Softmax softmax(rows);
#pragma omp for schedule(dynamic)
    for (size_t index = 0; index < tiles.size(); ++index) {
      const Tile& tile = tiles[index];
      const int32_t* blocks =
          args.block_tables + args.request[tile.first] * args.table_stride;
      const HeadReader<Format> keys(args.pages, args.page_stride, blocks, args.keys, tile.head);
      const HeadReader<Format> values(args.pages, args.page_stride, blocks, args.values, tile.head);
      read_queries<Format>(args.query, args.heads, head_size, group, tile, args.scale,
                           queries.data());
      std::fill(sums.begin(), sums.end(), 0.0f);
      softmax.reset();
      for_each_chunk(
          keys, args.positions + tile.first, group, tile.count, head_size, queries.data(),
          key_chunk.data(), logits.data(),
          [&](int row, int active, int64_t first, int seen, float* chunk) {
            for (int r = 0; r < active; ++r) {
              const float shrink = softmax.step(row + r, chunk + r * kChunk);
              float* sum = &sums[int64_t{row + r} * head_size];
              if (shrink != 1.0f)
                for (int c = 0; c < head_size; ++c) sum[c] *= shrink;
            }
            values.by_token(first, seen, value_chunk.data());
            multiply<true>(chunk, kChunk, value_chunk.data(), head_size, kChunk,
                           &sums[int64_t{row} * head_size], head_size, active, head_size);
          });
      auto* out = static_cast<typename Format::Code*>(args.out);
      for (int64_t q = 0; q < tile.count; ++q) {
        auto* to = out + ((tile.first + q) * args.heads + int64_t{tile.head} * group) * head_size;
        for (int g = 0; g < group; ++g) {
          const float* sum = &sums[(q * group + g) * head_size];
          const float inverse = 1.0f / softmax.sum(q * group + g);
          for (int c = 0; c < head_size; ++c)
            to[g * head_size + c] = Format::encode(sum[c] * inverse);
        }
      }
    }
  }
}

template <class Format>
void score(const ScoreArgs& args) {
  const int kv_heads = args.keys.heads, head_size = args.keys.channels;
  const int group = static_cast<int>(args.heads / kv_heads);
  const int64_t step = queries_per_tile(group), rows = step * group;
  std::vector<Tile> tiles;
  for (int head = 0; head < kv_heads; ++head)
    for (int64_t first = 0; first < args.queries; first += step)
      tiles.push_back({first, std::min(step, args.queries - first), head});
  std::vector<float> queries(tiles.size() * rows * head_size), level(tiles.size() * rows);
  const int64_t chunks = (args.tokens + kChunk - 1) / kChunk;
#pragma omp parallel
  {
    std::vector<float> logits(rows * kChunk), key_chunk(head_size * kChunk),
        columns(kChunk);
    Softmax softmax(rows);
    // The logarithm of each row's sum of exponentials.
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const Tile& tile = tiles[t];
      float* own = &queries[t * rows * head_size];
      read_queries<Format>(args.query, args.heads, head_size, group, tile, args.scale, own);
      const HeadReader<Format> keys(args.pages, args.page_stride, args.block_ids, args.keys,
                                    tile.head);
      softmax.reset();
      for_each_chunk(keys, args.positions + tile.first, group, tile.count, head_size, own,
                     key_chunk.data(), logits.data(),
                     [&](int row, int active, int64_t, int, float* chunk) {
                       for (int r = 0; r < active; ++r)
                         softmax.step(row + r, chunk + r * kChunk);
                     });
      for (int64_t r = 0; r < tile.count * group; ++r)
        level[t * rows + r] = softmax.peak(r) + std::log2(softmax.sum(r));
    }
    // Then the weights again, chunk by chunk, each summed by one thread in a fixed order.
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < chunks; ++index) {
      const int64_t first = (chunks - 1 - index) * kChunk;
      const int seen = static_cast<int>(std::min<int64_t>(kChunk, args.tokens - first));
      std::fill(columns.begin(), columns.end(), 0.0f);
      for (int head = 0, reader_of = -1; head < kv_heads; ++head) {
        const HeadReader<Format> keys(args.pages, args.page_stride, args.block_ids, args.keys, head);
        for (size_t t = 0; t < tiles.size(); ++t) {
          const Tile& tile = tiles[t];
          const int64_t* positions = args.positions + tile.first;
          if (tile.head != head || positions[tile.count - 1] < first) continue;
          if (reader_of != head) keys.by_channel(first, seen, key_chunk.data());
          reader_of = head;
          int64_t skipped = 0;
          while (positions[skipped] < first) ++skipped;
          const int64_t row = skipped * group;
          const int active = static_cast<int>(tile.count * group - row);
          multiply<false>(&queries[(t * rows + row) * head_size], head_size, key_chunk.data(),
                          kChunk, head_size, logits.data(), kChunk, active, kChunk);
          for (int r = 0; r < active; ++r) {
            float* logit = &logits[r * kChunk];
            const int64_t position = positions[skipped + r / group];
            if (position < first + kChunk - 1) hide(logit, static_cast<int>(position - first) + 1);
            for (int i = 0; i < kChunk; i += kLanes)
              store(&columns[i], load(&columns[i]) +
                                     power_of_two(load(logit + i) - level[t * rows + row + r]));
          }
        }
      }
      std::copy(columns.begin(), columns.begin() + seen, args.scores + first);
    }
  }
}

}  // namespace
}  // namespace segreuse::cpu

void segreuse_attention(const segreuse::cpu::AttentionArgs* args) {
  using namespace segreuse;
  using namespace segreuse::cpu;
  switch (args->dtype) {
    case DType::kFloat32: return attend<Float32>(*args);
    case DType::kBFloat16: return attend<BFloat16>(*args);
    default: return attend<NativeFloat16>(*args);
  }
}

void segreuse_scores(const segreuse::cpu::ScoreArgs* args) {
  using namespace segreuse;
  using namespace segreuse::cpu;
  switch (args->dtype) {
    case DType::kFloat32: return score<Float32>(*args);
    case DType::kBFloat16: return score<BFloat16>(*args);
    default: return score<NativeFloat16>(*args);
  }
}
