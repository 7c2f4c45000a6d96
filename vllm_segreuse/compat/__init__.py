# SPDX-License-Identifier: Apache-2.0
"""The only place that assigns to vLLM's attributes: one file per upstream module.

A file here knows vLLM, and nothing of this package outside of this folder: `install` is given what
it calls (`plugin.py` says who gets what, and when). `block_pool`, `kv_cache_manager` and
`triton_dispatcher` come with the connector's scheduler half; `attention_impl` replaces something
for the time of a pass only.
"""
