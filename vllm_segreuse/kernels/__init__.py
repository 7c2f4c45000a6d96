# SPDX-License-Identifier: Apache-2.0
"""The three kernels of segment reuse, imported as `vllm_segreuse.kernels`.

`align` moves cached keys and values to other slots and positions, `sparse_attention` attends from
scattered positions over the paged cache, `token_scores` sums the attention each key receives.
`reference.py` says what they do, in plain torch; every other file is one way to do it fast, which
`dispatch.py` asks whether it `supports` a page layout and dtype.

Two paths cannot be reached from a server yet, and run in tests only. `supported.py` refuses both
kinds of models, since the rest of the pass is not proven on them:

- fp8 (e4m3, e5m2) in `align`: until fp8 KV caches are supported, which takes quantised writes in
  the pass and scales in attention and scores.
- `Rotation.first` other than 0, and a layout of one part, in `align`: until MLA is supported, whose
  page rows are `[latent | k_pe]`, and whose attention none of these kernels computes.
"""
