// SPDX-License-Identifier: Apache-2.0
// Copies past the caches where whole lines are written: there is more of it than they hold, and a
// line that is overwritten need not be read first. Each thread calls `finish_copies` at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace segreuse::cpu {

inline bool is_line(const void* address) { return reinterpret_cast<uintptr_t>(address) % 64 == 0; }

inline void copy_past_caches(void* to, const void* from, size_t bytes) {
#if defined(__AVX512F__)
  if (is_line(to) && bytes % 64 == 0) {
    for (size_t i = 0; i < bytes; i += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i),
                          _mm512_loadu_si512(static_cast<const char*>(from) + i));
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Reads what is needed soon: the machine's own prefetching ends with a page of memory.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
}

// Other threads see what was copied.
inline void finish_copies() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

}  // namespace segreuse::cpu
