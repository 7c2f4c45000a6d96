// SPDX-License-Identifier: Apache-2.0
// Where the elements of keys and values lie in a KV page. Compiles for the host and for CUDA, and
// needs neither torch nor CUDA headers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SEGREUSE_HD __host__ __device__ __forceinline__
#else
#define SEGREUSE_HD inline
#endif

namespace segreuse {

// Element strides of keys or values in a page: the class of the same name in vllm_segreuse/kernels/pages.py, with
// its fields in the same order. Offsets in a page fit 32 bits (the callers see to that).
struct TiledStrides {
  int32_t heads, block_size, channels;
  int32_t offset, head;
  int32_t token_tile, token_hi, token_lo;
  int32_t channel_tile, channel_hi, channel_lo;

  // The part of the offset that a token contributes; `token` counts from the page's first.
  SEGREUSE_HD int32_t of_token(int32_t token) const {
    const int32_t tile = token / token_tile;
    return tile * token_hi + (token - tile * token_tile) * token_lo;
  }

  // What head and channel contribute, and the offset of the whole.
  SEGREUSE_HD int32_t of_channel(int32_t head_index, int32_t channel) const {
    const int32_t tile = channel / channel_tile;
    return offset + head_index * head + tile * channel_hi +
           (channel - tile * channel_tile) * channel_lo;
  }

  SEGREUSE_HD int32_t address(int32_t head_index, int32_t token, int32_t channel) const {
    return of_token(token) + of_channel(head_index, channel);
  }

  // Whether channels `[n * elements, (n + 1) * elements)` of every head and token lie side by side
  // and begin at a multiple of `elements`, counted from the page's first element.
  SEGREUSE_HD bool in_vectors_of(int32_t elements) const {
    if (elements == 1) return true;
    const bool unit = channel_lo == 1 && channel_tile % elements == 0;
    const bool aligned = (channel_tile == channels || channel_hi % elements == 0) &&
                         (token_tile == block_size || token_hi % elements == 0) &&
                         (token_tile == 1 || token_lo % elements == 0) &&
                         (heads == 1 || head % elements == 0) && offset % elements == 0;
    return unit && aligned && channels % elements == 0;
  }
};

}  // namespace segreuse
