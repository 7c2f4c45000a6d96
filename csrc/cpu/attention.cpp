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

#include "head_reader.h"
#include "kernels.h"
#include "products.h"
#include "vectors.h"

namespace segreuse::cpu {
namespace {

constexpr float kLog2E = 1.44269504f, kNever = -std::numeric_limits<float>::infinity();

// Queries of one request that are computed together, for one KV head.
struct Tile {
  int64_t first, count;
  int head;
};

// Queries times heads of a group; whole blocks of what the products compute at once.
#if defined(__AMX_BF16__)
constexpr int kTileRows = 112;
#else
constexpr int kTileRows = 108;
#endif

int64_t queries_per_tile(int64_t group) { return std::max<int64_t>(1, kTileRows / group); }

// Rows [query, head of the group] of a tile.
template <class Format, class Products>
void read_queries(const Products& products, const void* query, int64_t heads, int head_size,
                  int group, const Tile& tile, typename Products::Query* out) {
  const auto* codes = static_cast<const typename Format::Code*>(query);
  for (int64_t q = 0; q < tile.count; ++q, out += group * head_size) {
    const int64_t row = (tile.first + q) * heads + int64_t{tile.head} * group;
    products.read_query(codes + row * head_size, group * head_size, out);
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
template <class Format, class Products, class Visit>
void for_each_chunk(Products& products, const HeadReader<Format>& keys, const int64_t* positions,
                    int group, int64_t count, int head_size,
                    const typename Products::Query* queries, float* logits, Visit&& visit) {
  const int64_t end = positions[count - 1] + 1;
  int64_t skipped = 0;
  for (int64_t first = 0; first < end; first += kChunk) {
    const int seen = static_cast<int>(std::min<int64_t>(kChunk, end - first));
    while (positions[skipped] < first) ++skipped;
    const int row = static_cast<int>(skipped) * group;
    const int rows = static_cast<int>(count) * group - row;
    products.read_keys(keys, first, seen);
    products.logits(queries + int64_t{row} * head_size, rows, logits);
    for (int r = 0; r < rows; ++r) {
      const int64_t position = positions[skipped + r / group];
      if (position >= first + kChunk - 1) break;  // so do all later rows
      hide(logits + r * kChunk, static_cast<int>(position - first) + 1);
    }
    visit(row, rows, first, seen, logits);
  }
}

template <class Format, class Products>
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
    Products products(head_size, args.scale * kLog2E);
    std::vector<typename Products::Query> queries(padded(rows) * head_size);
    std::vector<float> sums(padded(rows) * head_size), logits(padded(rows) * kChunk);
    Softmax softmax(rows);
#pragma omp for schedule(dynamic)
    for (size_t index = 0; index < tiles.size(); ++index) {
      const Tile& tile = tiles[index];
      const int32_t* blocks =
          args.block_tables + args.request[tile.first] * args.table_stride;
      const HeadReader<Format> keys(args.pages, args.page_stride, blocks, args.keys, tile.head);
      const HeadReader<Format> values(args.pages, args.page_stride, blocks, args.values, tile.head);
      read_queries<Format>(products, args.query, args.heads, head_size, group, tile,
                           queries.data());
      std::fill(sums.begin(), sums.end(), 0.0f);
      softmax.reset();
      for_each_chunk(
          products, keys, args.positions + tile.first, group, tile.count, head_size,
          queries.data(), logits.data(),
          [&](int row, int active, int64_t first, int seen, float* chunk) {
            for (int r = 0; r < active; ++r) {
              const float shrink = softmax.step(row + r, chunk + r * kChunk);
              float* sum = &sums[int64_t{row + r} * head_size];
              if (shrink != 1.0f)
                for (int c = 0; c < head_size; ++c) sum[c] *= shrink;
            }
            products.read_values(values, first, seen);
            products.add(chunk, active, &sums[int64_t{row} * head_size]);
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

template <class Format, class Products>
void score(const ScoreArgs& args) {
  const int kv_heads = args.keys.heads, head_size = args.keys.channels;
  const int group = static_cast<int>(args.heads / kv_heads);
  const int64_t step = queries_per_tile(group), rows = step * group;
  std::vector<Tile> tiles;
  for (int head = 0; head < kv_heads; ++head)
    for (int64_t first = 0; first < args.queries; first += step)
      tiles.push_back({first, std::min(step, args.queries - first), head});
  std::vector<typename Products::Query> queries((tiles.size() * rows + padded(0)) * head_size);
  std::vector<float> level(tiles.size() * rows);
  const int64_t chunks = (args.tokens + kChunk - 1) / kChunk;
#pragma omp parallel
  {
    Products products(head_size, args.scale * kLog2E);
    std::vector<float> logits(padded(rows) * kChunk), columns(kChunk);
    Softmax softmax(rows);
    // The logarithm of each row's sum of exponentials.
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const Tile& tile = tiles[t];
      auto* own = &queries[t * rows * head_size];
      read_queries<Format>(products, args.query, args.heads, head_size, group, tile, own);
      const HeadReader<Format> keys(args.pages, args.page_stride, args.block_ids, args.keys,
                                    tile.head);
      softmax.reset();
      for_each_chunk(products, keys, args.positions + tile.first, group, tile.count, head_size,
                     own, logits.data(),
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
          if (reader_of != head) products.read_keys(keys, first, seen);
          reader_of = head;
          int64_t skipped = 0;
          while (positions[skipped] < first) ++skipped;
          const int64_t row = skipped * group;
          const int active = static_cast<int>(tile.count * group - row);
          products.logits(&queries[(t * rows + row) * head_size], active, logits.data());
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
#if defined(__AMX_BF16__)
  if (args->dtype == DType::kBFloat16 && MatrixProducts::takes(args->keys.channels))
    return attend<BFloat16, MatrixProducts>(*args);
#endif
  switch (args->dtype) {
    case DType::kFloat32: return attend<Float32, FloatProducts<Float32>>(*args);
    case DType::kBFloat16: return attend<BFloat16, FloatProducts<BFloat16>>(*args);
    default: return attend<NativeFloat16, FloatProducts<NativeFloat16>>(*args);
  }
}

void segreuse_scores(const segreuse::cpu::ScoreArgs* args) {
  using namespace segreuse;
  using namespace segreuse::cpu;
#if defined(__AMX_BF16__)
  if (args->dtype == DType::kBFloat16 && MatrixProducts::takes(args->keys.channels))
    return score<BFloat16, MatrixProducts>(*args);
#endif
  switch (args->dtype) {
    case DType::kFloat32: return score<Float32, FloatProducts<Float32>>(*args);
    case DType::kBFloat16: return score<BFloat16, FloatProducts<BFloat16>>(*args);
    default: return score<NativeFloat16, FloatProducts<NativeFloat16>>(*args);
  }
}
