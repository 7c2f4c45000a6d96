// SPDX-License-Identifier: Apache-2.0
// The two products of attention, of a tile of query rows with a chunk of keys and values: in float32
// vectors, or in the matrix unit of machines that have one (AMX).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "head_reader.h"
#include "vectors.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace segreuse::cpu {

// Query rows that the products take at a time: their logits stay in the innermost cache.
constexpr int kStripe = 16;

// For any formats: queries, keys and values are unpacked to float32.
template <class Format, class Stored>
class FloatProducts {
 public:
  using Reader = HeadReader<Stored>;
  using Query = float;
  using Weight = float;
  static constexpr bool kRough = false;  // whether weights are rounded to bfloat16

  explicit FloatProducts(int head_size)
      : head_size_(head_size), keys_(head_size * kChunk), values_(head_size * kChunk) {}

  static void read_query(const typename Format::Code* from, int count, Query* out) {
    for (int i = 0; i < count; ++i) out[i] = Format::decode(from[i]);
  }

  void read_keys(const Reader& reader, int64_t first, int count) {
    reader.by_channel(first, count, keys_.data());
  }

  // out[rows][kChunk]: products of queries with the keys that were read last.
  void logits(const Query* queries, int rows, float* out) const {
    multiply<false>(queries, head_size_, keys_.data(), kChunk, head_size_, out, kChunk, rows,
                    kChunk);
  }

  static void write_weights(Floats low, Floats high, Weight* out) {
    store(out, low);
    store(out + kLanes, high);
  }

  void read_values(const Reader& reader, int64_t first, int count) {
    reader.by_token(first, count, values_.data());
  }

  // sums[rows][head_size] += weights[rows][kChunk] times the values that were read last.
  void add(const Weight* weights, int rows, float* sums) const {
    multiply<true>(weights, kChunk, values_.data(), head_size_, kChunk, sums, head_size_, rows,
                   head_size_);
  }

 private:
  int head_size_;
  std::vector<float> keys_, values_;
};

#if defined(__AMX_BF16__)

// GCC's intrinsics name 8 of the 64 bytes of a configuration, and none of the memory that a tile is
// loaded from: the compiler may leave out what is stored there, or store it later.
struct alignas(64) TileConfig {
  uint8_t palette = 0;
  uint8_t rest[15] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

inline void store_config(TileConfig& config) { asm volatile("sttilecfg %0" : "=m"(config)); }

// What was stored before is in memory.
inline void finish_stores() { asm volatile("" : : : "memory"); }

// For bfloat16 and head sizes that are multiples of 32. Products of queries and keys are as exact as
// in float32; weights are rounded to bfloat16 before they meet the values. Pages that lie as the
// matrix unit wants them are read where they are.
//
// One object per thread and parallel region: it configures the thread's tiles, and puts back what
// was there, which other libraries count on.
class MatrixProducts {
 public:
  using Reader = HeadReader<BFloat16>;
  using Query = uint16_t;
  using Weight = uint16_t;
  static constexpr bool kRough = true;

  explicit MatrixProducts(int head_size)
      : head_size_(head_size), keys_(head_size * kChunk), values_(head_size * kChunk) {
    store_config(before_);
    TileConfig config;
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    load_config(config);
  }

  ~MatrixProducts() {
    if (before_.palette)
      load_config(before_);
    else
      _tile_release();
  }

  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  static bool takes(int head_size) { return head_size % 32 == 0; }

  static void read_query(const uint16_t* from, int count, Query* out) {
    std::memcpy(out, from, count * sizeof *from);
  }

  void read_keys(const Reader& reader, int64_t first, int count) {
    reader.key_tiles(first, count, keys_.data(), key_tiles_);
  }

  // All 16 rows, of which only `rows` matter.
  void logits(const Query* queries, int, float* out) const {
    finish_stores();
    for (int k = 0; k < kChunk / 16; k += 4) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int c = 0; c < head_size_; c += 32) {
        _tile_loadd(4, queries + c, 2 * head_size_);
        _tile_loadd(5, key_tiles_[k] + c * 16, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, key_tiles_[k + 1] + c * 16, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, key_tiles_[k + 2] + c * 16, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, key_tiles_[k + 3] + c * 16, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      float* to = out + k * 16;
      _tile_stored(0, to, 4 * kChunk);
      _tile_stored(1, to + 16, 4 * kChunk);
      _tile_stored(2, to + 32, 4 * kChunk);
      _tile_stored(3, to + 48, 4 * kChunk);
    }
  }

  static void write_weights(Floats low, Floats high, Weight* out) {
    const auto rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(out, &rounded, sizeof rounded);
  }

  void read_values(const Reader& reader, int64_t first, int count) {
    value_lines_ = reader.value_lines(first, count, values_.data());
  }

  void add(const Weight* weights, int, float* sums) const {
    finish_stores();
    for (int c = 0; c < head_size_; c += 32) {
      _tile_loadd(0, sums + c, 4 * head_size_);
      _tile_loadd(1, sums + c + 16, 4 * head_size_);
      for (int k = 0; k < kChunk / 32; ++k) {
        const uint16_t* values = value_lines_.of_keys[k] + c / 16 * value_lines_.step;
        _tile_loadd(4, weights + k * 32, 2 * kChunk);
        _tile_loadd(5, values, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, values + value_lines_.step, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, sums + c, 4 * head_size_);
      _tile_stored(1, sums + c + 16, 4 * head_size_);
    }
  }

 private:
  int head_size_;
  std::vector<uint16_t> keys_, values_;
  const uint16_t* key_tiles_[kChunk / 16];
  Reader::ValueLines value_lines_;
  TileConfig before_;
};

#endif

}  // namespace segreuse::cpu
