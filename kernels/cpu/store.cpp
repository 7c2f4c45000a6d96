// SPDX-License-Identifier: Apache-2.0
// Copy whole pages to rows of a host region (vllm_segreuse/kernels/reference.py, `store`).
//
// A row has the pages of all layers one after the other: it is written from its beginning to its
// end, by one thread.

#include "cpu/kernels.h"
#include "cpu/past_caches.h"

void segreuse_store(const segreuse::cpu::StoreArgs* args) {
  using namespace segreuse::cpu;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < args->count; ++i) {
      for (int64_t layer = 0; layer < args->layers; ++layer) {
        const char* from = static_cast<const char*>(args->pages[layer]);
        char* to = static_cast<char*>(args->cells[layer]);
        copy_past_caches(to + args->rows[i] * args->cell_stride,
                         from + args->blocks[i] * args->page_stride, args->page_bytes);
      }
    }
    finish_copies();
  }
}
