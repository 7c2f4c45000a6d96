# SPDX-License-Identifier: Apache-2.0
"""Segments that are similar, not equal: found by MinHash, aligned token by token.

    canonical ─► store ─► minhash ─► windows ─► align ─► a slot for each token ─► fill
    tokens as    windows  signatures which       which tokens                     what may
    compared                         donors      are equal                        be copied

All but `fill` runs when a request arrives. What `fill` lets through is compared token by token:
only KV of equal tokens is ever reused.
"""
