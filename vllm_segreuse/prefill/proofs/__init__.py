# SPDX-License-Identifier: Apache-2.0
"""Proofs at start-up, on the loaded model itself: `checks.py` calls them in order.

`causal` refuses what none of them could notice. `scratch` has the tokens that the others work on:
`rotations` of the keys, `moves` of tokens, `scores` of tokens, whole `passes`, and the `attention`
of single layers.
"""
