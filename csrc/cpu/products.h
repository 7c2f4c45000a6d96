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

// Rows of a buffer for `rows` rows: the matrix unit takes 16 at a time.
constexpr int64_t padded(int64_t rows) { return rows + 16; }

// For any format: queries, keys and values are unpacked to float32.
template <class Format>
class FloatProducts {
 public:
  using Query = float;

  FloatProducts(int head_size, float scale)
      : head_size_(head_size),
        scale_(scale),
        keys_(head_size * kChunk),
        values_(head_size * kChunk) {}

  void read_query(const typename Format::Code* from, int count, Query* out) const {
    for (int i = 0; i < count; ++i) out[i] = Format::decode(from[i]) * scale_;
  }

  void read_keys(const HeadReader<Format>& reader, int64_t first, int count) {
    reader.by_channel(first, count, keys_.data());
  }

  // out[rows][kChunk]: scaled products of queries with the keys that were read last.
  void logits(const Query* queries, int rows, float* out) const {
    multiply<false>(queries, head_size_, keys_.data(), kChunk, head_size_, out, kChunk, rows,
                    kChunk);
  }

  void read_values(const HeadReader<Format>& reader, int64_t first, int count) {
    reader.by_token(first, count, values_.data());
  }

  // sums[rows][head_size] += weights[rows][kChunk] times the values that were read last.
  void add(const float* weights, int rows, float* sums) {
    multiply<true>(weights, kChunk, values_.data(), head_size_, kChunk, sums, head_size_, rows,
                   head_size_);
  }

 private:
  int head_size_;
  float scale_;
  std::vector<float> keys_, values_;
};

#if defined(__AMX_BF16__)

// For bfloat16 and head sizes that are multiples of 32. Products of queries and keys are as exact as
// in float32; weights are rounded to bfloat16 before they meet the values.
//
// One object per thread and parallel region: it configures the thread's tiles, and puts back what
// was there, which other libraries count on.
class MatrixProducts {
 public:
  using Query = uint16_t;

  MatrixProducts(int head_size, float scale)
      : head_size_(head_size),
        scale_(scale),
        keys_(head_size * kChunk),
        values_(head_size * kChunk) {
    _tile_storeconfig(before_);
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // palette
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;  // bytes per row
      config[48 + tile] = 16;      // rows
    }
    _tile_loadconfig(config);
  }

  ~MatrixProducts() {
    if (before_[0])
      _tile_loadconfig(before_);
    else
      _tile_release();
  }

  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  static bool takes(int head_size) { return head_size % 32 == 0; }

  void read_query(const uint16_t* from, int count, Query* out) const {
    std::memcpy(out, from, count * sizeof *from);
  }

  void read_keys(const HeadReader<BFloat16>& reader, int64_t first, int count) {
    reader.key_pairs(first, count, keys_.data());
  }

  void logits(const Query* queries, int rows, float* out) const {
    const int stride = 2 * head_size_;
    for (int r = 0; r < rows; r += 16)
      for (int k = 0; k < kChunk; k += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < head_size_; c += 32) {
          _tile_loadd(4, queries + r * head_size_ + c, stride);
          const uint16_t* keys = &keys_[c * kChunk + k * 32];  // tiles of 16 keys, 32 channels
          _tile_loadd(5, keys, 64);
          _tile_dpbf16ps(0, 4, 5);
          _tile_loadd(6, keys + 512, 64);
          _tile_dpbf16ps(1, 4, 6);
          _tile_loadd(7, keys + 1024, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_loadd(5, keys + 1536, 64);
          _tile_dpbf16ps(3, 4, 5);
        }
        float* to = out + r * kChunk + k;
        _tile_stored(0, to, 4 * kChunk);
        _tile_stored(1, to + 16, 4 * kChunk);
        _tile_stored(2, to + 32, 4 * kChunk);
        _tile_stored(3, to + 48, 4 * kChunk);
      }
    for (int i = 0; i < rows * kChunk; i += kLanes) store(out + i, load(out + i) * scale_);
  }

  void read_values(const HeadReader<BFloat16>& reader, int64_t first, int count) {
    reader.value_pairs(first, count, values_.data());
  }

  void add(const float* weights, int rows, float* sums) {
    weights_.resize(padded(rows) * kChunk);
    for (int i = 0; i < rows * kChunk; i += 32) {
      const auto rounded =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + i + 16), _mm512_loadu_ps(weights + i));
      std::memcpy(&weights_[i], &rounded, sizeof rounded);
    }
    for (int r = 0; r < rows; r += 16)
      for (int c = 0; c < head_size_; c += 32) {
        float* sum = sums + r * head_size_ + c;
        _tile_loadd(0, sum, 4 * head_size_);
        _tile_loadd(1, sum + 16, 4 * head_size_);
        for (int k = 0; k < kChunk; k += 32) {
          const uint16_t* values = &values_[k * head_size_ + c * 32];  // of 32 keys, 16 channels
          _tile_loadd(4, &weights_[r * kChunk + k], 2 * kChunk);
          _tile_loadd(5, values, 64);
          _tile_dpbf16ps(0, 4, 5);
          _tile_loadd(6, values + 512, 64);
          _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, sum, 4 * head_size_);
        _tile_stored(1, sum + 16, 4 * head_size_);
      }
  }

 private:
  int head_size_;
  float scale_;
  std::vector<uint16_t> keys_, values_, weights_;
  alignas(64) uint8_t before_[64];
};

#endif

}  // namespace segreuse::cpu
