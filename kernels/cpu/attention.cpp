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

// Bounds products, so that times `scale` they are soft_cap * tanh(logit / soft_cap).
inline void cap(float* products, int count, float scale, float soft_cap) {
  const float inward = 2 * kLog2E * scale / soft_cap, outward = soft_cap / scale;
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = load(products + i);
    const Floats shrunk = power_of_two(select(x < 0.0f, x, -x) * inward);  // exp(-2|x|)
    const Floats bounded = outward * (1.0f - shrunk) / (1.0f + shrunk);
    store(products + i, select(x < 0.0f, -bounded, bounded));
  }
}

// Weights may be 2 to the power of this.
constexpr float kHeadroom = 8.0f;

// The online softmax of a tile's rows: peaks, and sums of weights, lane by lane. Logits are products
// times a scale, to base 2.
class Softmax {
 public:
  Softmax(int64_t rows, const Weights& weights)
      : scale_(weights.scale * kLog2E), sinks_(weights.sinks), peak_(rows), sums_(rows * kLanes) {}

  // Before any key: rows [query, head of a group of heads from `first_head` on].
  void reset(int64_t first_head, int group) {
    std::fill(peak_.begin(), peak_.end(), kNever);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    if (sinks_ == nullptr) return;
    for (size_t row = 0; row < peak_.size(); ++row) {
      peak_[row] = sinks_[first_head + row % group] * kLog2E;
      sums_[row * kLanes] = 1.0f;
    }
  }

  // Takes a row's products with a chunk of keys; write(key, weights, weights of the lanes behind).
  // Returns what the row's earlier results are to be multiplied by.
  template <bool kRough, class Write>
  float step(int64_t row, const float* products, Write&& write) {
    Floats high = load(products);
    for (int i = kLanes; i < kChunk; i += kLanes) {
      const Floats next = load(products + i);
      high = select(next > high, next, high);
    }
    float shrink = 1.0f;
    // A peak that is a little too low does as well, and most chunks then need no new one.
    if (any_above(high, (peak_[row] + kHeadroom) / scale_)) {
      const float before = peak_[row];
      peak_[row] = largest(high) * scale_;
      shrink = std::exp2(before - peak_[row]);
    }
    const float peak = peak_[row];
    Floats weights{};
    for (int i = 0; i < kChunk; i += 2 * kLanes) {
      const Floats low = power_of_two<kRough>(load(products + i) * scale_ - peak);
      const Floats next = power_of_two<kRough>(load(products + i + kLanes) * scale_ - peak);
      write(i, low, next);
      weights += low + next;
    }
    float* sums = &sums_[row * kLanes];
    store(sums, load(sums) * shrink + weights);
    return shrink;
  }

  float sum(int64_t row) const { return total(load(&sums_[row * kLanes])); }
  float peak(int64_t row) const { return peak_[row]; }

 private:
  float scale_;
  const float* sinks_;
  std::vector<float> peak_, sums_;
};

// A chunk of keys, and the queries of a tile that see some of it: all between two of them, as their
// positions ascend.
struct Chunk {
  int64_t first;  // key
  int keys;
  int64_t from, until;  // queries
};

// Products of a tile's rows with the keys of a chunk, which were read last, stripe by stripe,
// capped and masked. visit(first row, rows, products[kStripe][kChunk]).
template <class Products, class Visit>
void for_each_stripe(const Products& products, const int64_t* positions, int group, int64_t window,
                     const Weights& weights, const Chunk& chunk, int head_size,
                     const typename Products::Query* queries, Visit&& visit) {
  alignas(64) float stripe[kStripe * kChunk];
  const int end = static_cast<int>(chunk.until) * group;
  for (int row = static_cast<int>(chunk.from) * group; row < end; row += kStripe) {
    const int rows = std::min(kStripe, end - row);
    products.logits(queries + int64_t{row} * head_size, rows, stripe);
    if (weights.soft_cap > 0) cap(stripe, rows * kChunk, weights.scale, weights.soft_cap);
    for (int r = 0; r < rows; ++r) {
      const int64_t seen = positions[(row + r) / group] + 1 - chunk.first;
      if (seen >= kChunk) break;  // so do all later rows
      std::fill(stripe + r * kChunk + seen, stripe + (r + 1) * kChunk, kNever);
    }
    for (int r = rows - 1; window > 0 && r >= 0; --r) {
      const int64_t before = positions[(row + r) / group] + 1 - window - chunk.first;
      if (before <= 0) break;  // so do all earlier rows
      std::fill(stripe + r * kChunk, stripe + r * kChunk + before, kNever);
    }
    visit(row, rows, stripe);
  }
}

// Walk the keys that some query of a tile sees, chunk by chunk: visit(chunk).
template <class Visit>
void for_each_chunk(const int64_t* positions, int64_t count, int64_t window, Visit&& visit) {
  const int64_t end = positions[count - 1] + 1;
  const int64_t begin = window > 0 ? std::max<int64_t>(0, positions[0] + 1 - window) : 0;
  Chunk chunk{begin / kChunk * kChunk, 0, 0, window > 0 ? 0 : count};
  for (; chunk.first < end; chunk.first += kChunk) {
    chunk.keys = static_cast<int>(std::min<int64_t>(kChunk, end - chunk.first));
    while (positions[chunk.from] < chunk.first) ++chunk.from;
    while (chunk.until < count && positions[chunk.until] + 1 - window < chunk.first + chunk.keys)
      ++chunk.until;
    if (chunk.from < chunk.until) visit(chunk);
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
    Softmax softmax(rows, args.weights);
#pragma omp for schedule(dynamic)
    for (size_t index = 0; index < tiles.size(); ++index) {
      const Tile& tile = tiles[index];
      const int32_t* blocks =
          args.block_tables + args.request[tile.first] * args.table_stride;
      const typename Products::Reader keys(args.pages, args.page_stride, blocks, args.keys, tile.head);
      const typename Products::Reader values(args.pages, args.page_stride, blocks, args.values, tile.head);
      const int64_t* positions = args.positions + tile.first;
      read_queries<Format, Products>(args.query, args.heads, head_size, group, tile,
                                     queries.data());
      std::fill(sums.begin(), sums.end(), 0.0f);
      softmax.reset(int64_t{tile.head} * group, group);
      for_each_chunk(positions, tile.count, args.window, [&](const Chunk& chunk) {
        products.read_keys(keys, chunk.first, chunk.keys);
        products.read_values(values, chunk.first, chunk.keys);
        for_each_stripe(
            products, positions, group, args.window, args.weights, chunk, head_size, queries.data(),
            [&](int row, int active, const float* stripe) {
              for (int r = 0; r < active; ++r) {
                auto* own = &weights[int64_t{row + r} * kChunk];
                const float shrink = softmax.step<Products::kRough>(
                    row + r, stripe + r * kChunk, [&](int key, Floats low, Floats high) {
                      Products::write_weights(low, high, own + key);
                    });
                float* sum = &sums[int64_t{row + r} * head_size];
                if (shrink != 1.0f)
                  for (int c = 0; c < head_size; ++c) sum[c] *= shrink;
              }
            });
        // The matrix unit adds whole stripes: rows behind the chunk's add nothing.
        if (chunk.until < tile.count)
          std::fill_n(&weights[chunk.until * group * kChunk], kStripe * kChunk, 0);
        // Not stripe by stripe: the matrix unit would wait for weights on their way to the cache.
        for (int64_t row = chunk.from * group; row < chunk.until * group; row += kStripe)
          products.add(&weights[row * kChunk],
                       static_cast<int>(std::min<int64_t>(kStripe, chunk.until * group - row)),
                       &sums[row * head_size]);
      });
      auto* out = static_cast<typename Format::Code*>(args.out);
      for (int64_t q = 0; q < tile.count; ++q) {
        auto* to = out + ((tile.first + q) * args.heads + int64_t{tile.head} * group) * head_size;
        for (int g = 0; g < group; ++g) {
          const float* sum = &sums[(q * group + g) * head_size];
          const float inverse = args.value_scale / softmax.sum(q * group + g);
          for (int c = 0; c < head_size; ++c)
            to[g * head_size + c] = Format::encode(sum[c] * inverse);
        }
      }
    }
  }
}

template <class Format, class Products, bool kHighest, bool kLate>
void score(const ScoreArgs& args) {
  const int kv_heads = args.keys.heads, head_size = args.keys.channels;
  const int group = static_cast<int>(args.heads / kv_heads);
  const int64_t step = queries_per_tile(group), rows = step * group;
  const float scale = args.weights.scale * kLog2E;
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
    std::vector<float> columns(kChunk), late_columns(kChunk);
    Softmax softmax(rows, args.weights);
    // The logarithm of each row's sum of exponentials.
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const Tile& tile = tiles[t];
      const int64_t* positions = args.positions + tile.first;
      auto* own = &queries[t * rows * head_size];
      read_queries<Format, Products>(args.query, args.heads, head_size, group, tile, own);
      const typename Products::Reader keys(args.pages, args.page_stride, args.block_ids, args.keys,
                                    tile.head);
      softmax.reset(int64_t{tile.head} * group, group);
      for_each_chunk(positions, tile.count, 0, [&](const Chunk& chunk) {
        products.read_keys(keys, chunk.first, chunk.keys);
        for_each_stripe(products, positions, group, 0, args.weights, chunk, head_size, own,
                        [&](int row, int active, const float* stripe) {
                          for (int r = 0; r < active; ++r)
                            softmax.step<false>(row + r, stripe + r * kChunk, [](int, Floats, Floats) {});
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
      if (kLate) std::fill(late_columns.begin(), late_columns.end(), 0.0f);
      for (int head = 0, reader_of = -1; head < kv_heads; ++head) {
        const typename Products::Reader keys(args.pages, args.page_stride, args.block_ids, args.keys, head);
        for (size_t t = 0; t < tiles.size(); ++t) {
          const Tile& tile = tiles[t];
          const int64_t* positions = args.positions + tile.first;
          if (tile.head != head || positions[tile.count - 1] < first) continue;
          if (reader_of != head) products.read_keys(keys, first, seen);
          reader_of = head;
          Chunk chunk{first, seen, 0, tile.count};
          while (positions[chunk.from] < first) ++chunk.from;
          for_each_stripe(products, positions, group, 0, args.weights, chunk, head_size,
                          &queries[t * rows * head_size],
                          [&](int row, int active, const float* stripe) {
                            for (int r = 0; r < active; ++r) {
                              const bool late = kLate && tile.first + (row + r) / group >= args.late_from;
                              for (int i = 0; i < kChunk; i += kLanes) {
                                const Floats column = load(&columns[i]);
                                const Floats weight =
                                    power_of_two(load(stripe + r * kChunk + i) * scale -
                                                 level[t * rows + row + r]);
                                store(&columns[i], kHighest ? select(column < weight, weight, column)
                                                            : column + weight);
                                if (late) store(&late_columns[i], load(&late_columns[i]) + weight);
                              }
                            }
                          });
        }
      }
      std::copy(columns.begin(), columns.begin() + seen, args.scores + first);
      if (kLate) std::copy(late_columns.begin(), late_columns.begin() + seen, args.late_scores + first);
    }
  }
}

template <class Format, class Products>
void score(const ScoreArgs& args) {
  if (args.highest) return score<Format, Products, true, false>(args);
  args.late_scores ? score<Format, Products, false, true>(args) : score<Format, Products, false, false>(args);
}

template <class T>
struct Type {
  using type = T;
};

// run(format of queries, Type<Products>) for these queries and pages.
template <class Run>
void with_formats(DType queries, DType pages, [[maybe_unused]] int head_size, Run&& run) {
#if defined(__AMX_BF16__)
  if (queries == DType::kBFloat16 && pages == queries && MatrixProducts::takes(head_size))
    return run(BFloat16{}, Type<MatrixProducts>{});
#endif
  const auto with_pages = [&](auto format) {
    using Format = decltype(format);
    switch (pages) {
      case DType::kFloat8E4M3: return run(format, Type<FloatProducts<Format, Float8E4M3>>{});
      case DType::kFloat8E5M2: return run(format, Type<FloatProducts<Format, Float8E5M2>>{});
      default: return run(format, Type<FloatProducts<Format, Format>>{});
    }
  };
  switch (queries) {
    case DType::kFloat32: return with_pages(Float32{});
    case DType::kBFloat16: return with_pages(BFloat16{});
    default: return with_pages(NativeFloat16{});
  }
}

}  // namespace
}  // namespace segreuse::cpu

void segreuse_attention(const segreuse::cpu::AttentionArgs* args) {
  using namespace segreuse::cpu;
  with_formats(args->dtype, args->pages_dtype, args->keys.channels, [&](auto format, auto products) {
    attend<decltype(format), typename decltype(products)::type>(*args);
  });
}

void segreuse_scores(const segreuse::cpu::ScoreArgs* args) {
  using namespace segreuse::cpu;
  with_formats(args->dtype, args->pages_dtype, args->keys.channels, [&](auto format, auto products) {
    score<decltype(format), typename decltype(products)::type>(*args);
  });
}
