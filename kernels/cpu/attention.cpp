// SPDX-License-Identifier: Apache-2.0
// Attention of queries at scattered positions over a paged cache, and what attention each key
// receives (vllm_segreuse/kernels/reference.py, `sparse_attention` and `token_scores`).
//
// Neighbouring queries of a request share a tile: its pages are unpacked to float32 once for all
// queries and heads that read them, and both products run as small matrix products in registers.
// Only chunks of keys that reach beyond a query's own position are masked.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/head_reader.h"
#include "cpu/kernels.h"
#include "cpu/products.h"
#include "cpu/vectors.h"

namespace segreuse::cpu {
namespace {

constexpr float kLog2E = 1.44269504f, kNever = -std::numeric_limits<float>::infinity();

// Queries of one request that are computed together, for one KV head.
struct Tile {
  int64_t first, count;
  int head;
};

// Query rows, of a group's heads each, that share what is read of keys and values.
constexpr int kTileRows = 112;

int64_t queries_per_tile(int64_t group) { return std::max<int64_t>(1, kTileRows / group); }

// Room for rows that are computed in whole stripes.
int64_t padded(int64_t rows) { return rows + kStripe; }

// Rows [query, head of the group] of a tile.
template <class Format, class Products>
void read_queries(const void* query, int64_t heads, int head_size, int group, const Tile& tile,
                  typename Products::Query* out) {
  const auto* codes = static_cast<const typename Format::Code*>(query);
  for (int64_t q = 0; q < tile.count; ++q, out += group * head_size) {
    const int64_t row = (tile.first + q) * heads + int64_t{tile.head} * group;
    Products::read_query(codes + row * head_size, group * head_size, out);
  }
}

// Hide what a row may not see of a chunk: the keys from `visible` on.
inline void hide(float* row, int visible) {
  for (int i = std::max(visible, 0); i < kChunk; ++i) row[i] = kNever;
}

// The online softmax of a tile's rows: peaks, and sums of weights, lane by lane. Logits are products
// times a scale, to base 2.
class Softmax {
 public:
  Softmax(int64_t rows, float scale) : scale_(scale), peak_(rows), sums_(rows * kLanes) {}

  void reset() {
    std::fill(peak_.begin(), peak_.end(), kNever);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
  }

  // Takes a row's products with a chunk of keys; write(key, weights, weights of the lanes behind).
  // Returns what the row's earlier results are to be multiplied by.
  template <class Write>
  float step(int64_t row, const float* products, Write&& write) {
    Floats high = load(products);
    for (int i = kLanes; i < kChunk; i += kLanes) {
      const Floats next = load(products + i);
      high = select(next > high, next, high);
    }
    const float before = peak_[row], after = std::max(before, largest(high) * scale_);
    Floats weights{};
    for (int i = 0; i < kChunk; i += 2 * kLanes) {
      const Floats low = power_of_two(load(products + i) * scale_ - after);
      const Floats next = power_of_two(load(products + i + kLanes) * scale_ - after);
      write(i, low, next);
      weights += low + next;
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
  float scale_;
  std::vector<float> peak_, sums_;
};

// Products of a tile's rows with the keys that were read last, stripe by stripe, masked. The rows
// of the first `skipped` queries see none of these keys.
// visit(first row, rows, products[kStripe][kChunk]).
template <class Products, class Visit>
void for_each_stripe(const Products& products, const int64_t* positions, int group, int64_t count,
                     int64_t skipped, int64_t first, int head_size,
                     const typename Products::Query* queries, Visit&& visit) {
  alignas(64) float stripe[kStripe * kChunk];
  const int end = static_cast<int>(count) * group;
  for (int row = static_cast<int>(skipped) * group; row < end; row += kStripe) {
    const int rows = std::min(kStripe, end - row);
    products.logits(queries + int64_t{row} * head_size, rows, stripe);
    for (int r = 0; r < rows; ++r) {
      const int64_t position = positions[(row + r) / group];
      if (position >= first + kChunk - 1) break;  // so do all later rows
      hide(stripe + r * kChunk, static_cast<int>(position - first) + 1);
    }
    visit(row, rows, stripe);
  }
}

// Walk a tile's keys, chunk by chunk: visit(queries that see none of it, first key, keys).
template <class Visit>
void for_each_chunk(const int64_t* positions, int64_t count, Visit&& visit) {
  const int64_t end = positions[count - 1] + 1;
  int64_t skipped = 0;
  for (int64_t first = 0; first < end; first += kChunk) {
    while (positions[skipped] < first) ++skipped;
    visit(skipped, first, static_cast<int>(std::min<int64_t>(kChunk, end - first)));
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
    Products products(head_size);
    std::vector<typename Products::Query> queries(padded(rows) * head_size);
    std::vector<float> sums(padded(rows) * head_size);
    std::vector<typename Products::Weight> weights(padded(rows) * kChunk);
    Softmax softmax(rows, args.scale * kLog2E);
#pragma omp for schedule(dynamic)
    for (size_t index = 0; index < tiles.size(); ++index) {
      const Tile& tile = tiles[index];
      const int32_t* blocks =
          args.block_tables + args.request[tile.first] * args.table_stride;
      const HeadReader<Format> keys(args.pages, args.page_stride, blocks, args.keys, tile.head);
      const HeadReader<Format> values(args.pages, args.page_stride, blocks, args.values, tile.head);
      const int64_t* positions = args.positions + tile.first;
      read_queries<Format, Products>(args.query, args.heads, head_size, group, tile,
                                     queries.data());
      std::fill(sums.begin(), sums.end(), 0.0f);
      softmax.reset();
      for_each_chunk(positions, tile.count, [&](int64_t skipped, int64_t first, int seen) {
        products.read_keys(keys, first, seen);
        products.read_values(values, first, seen);
        for_each_stripe(
            products, positions, group, tile.count, skipped, first, head_size, queries.data(),
            [&](int row, int active, const float* stripe) {
              for (int r = 0; r < active; ++r) {
                auto* own = &weights[int64_t{row + r} * kChunk];
                const float shrink = softmax.step(
                    row + r, stripe + r * kChunk, [&](int key, Floats low, Floats high) {
                      Products::write_weights(low, high, own + key);
                    });
                float* sum = &sums[int64_t{row + r} * head_size];
                if (shrink != 1.0f)
                  for (int c = 0; c < head_size; ++c) sum[c] *= shrink;
              }
            });
        // Not stripe by stripe: the matrix unit would wait for weights on their way to the cache.
        for (int64_t row = skipped * group; row < tile.count * group; row += kStripe)
          products.add(&weights[row * kChunk],
                       static_cast<int>(std::min<int64_t>(kStripe, tile.count * group - row)),
                       &sums[row * head_size]);
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

template <class Format, class Products, bool kHighest>
void score(const ScoreArgs& args) {
  const int kv_heads = args.keys.heads, head_size = args.keys.channels;
  const int group = static_cast<int>(args.heads / kv_heads);
  const int64_t step = queries_per_tile(group), rows = step * group;
  const float scale = args.scale * kLog2E;
  std::vector<Tile> tiles;
  for (int head = 0; head < kv_heads; ++head)
    for (int64_t first = 0; first < args.queries; first += step)
      tiles.push_back({first, std::min(step, args.queries - first), head});
  std::vector<typename Products::Query> queries((tiles.size() * rows + padded(0)) * head_size);
  std::vector<float> level(tiles.size() * rows);
  const int64_t chunks = (args.tokens + kChunk - 1) / kChunk;
#pragma omp parallel
  {
    Products products(head_size);
    std::vector<float> columns(kChunk);
    Softmax softmax(rows, scale);
    // The logarithm of each row's sum of exponentials.
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const Tile& tile = tiles[t];
      const int64_t* positions = args.positions + tile.first;
      auto* own = &queries[t * rows * head_size];
      read_queries<Format, Products>(args.query, args.heads, head_size, group, tile, own);
      const HeadReader<Format> keys(args.pages, args.page_stride, args.block_ids, args.keys,
                                    tile.head);
      softmax.reset();
      for_each_chunk(positions, tile.count, [&](int64_t skipped, int64_t first, int seen) {
        products.read_keys(keys, first, seen);
        for_each_stripe(products, positions, group, tile.count, skipped, first, head_size, own,
                        [&](int row, int active, const float* stripe) {
                          for (int r = 0; r < active; ++r)
                            softmax.step(row + r, stripe + r * kChunk, [](int, Floats, Floats) {});
                        });
      });
      for (int64_t r = 0; r < tile.count * group; ++r)
        level[t * rows + r] = softmax.peak(r) + std::log2(softmax.sum(r));
    }
    // Then the weights again, chunk by chunk, each gathered by one thread in a fixed order.
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
          for_each_stripe(products, positions, group, tile.count, skipped, first, head_size,
                          &queries[t * rows * head_size],
                          [&](int row, int active, const float* stripe) {
                            for (int r = 0; r < active; ++r)
                              for (int i = 0; i < kChunk; i += kLanes) {
                                const Floats column = load(&columns[i]);
                                const Floats weight =
                                    power_of_two(load(stripe + r * kChunk + i) * scale -
                                                 level[t * rows + row + r]);
                                store(&columns[i], kHighest ? select(column < weight, weight, column)
                                                            : column + weight);
                              }
                          });
        }
      }
      std::copy(columns.begin(), columns.begin() + seen, args.scores + first);
    }
  }
}

template <class Format, class Products>
void score(const ScoreArgs& args) {
  args.highest ? score<Format, Products, true>(args) : score<Format, Products, false>(args);
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
