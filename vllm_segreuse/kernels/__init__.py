# SPDX-License-Identifier: Apache-2.0
"""The kernels of segment reuse, imported as `vllm_segreuse.kernels`.

`align` moves cached keys and values to other slots and positions, `sparse_attention` attends from
scattered positions over the paged cache, `token_scores` sums the attention each key receives.
`reference.py` says what they do, in plain torch; every other file is one way to do it fast, which
`dispatch.py` asks whether it `supports` a page layout and dtype. `store` copies pages to rows of
another memory, from which `align` reads them; `codecs.py` says how these may be stored.
"""
