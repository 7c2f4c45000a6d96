# SPDX-License-Identifier: Apache-2.0
"""Layers that hand a state on: the state behind a segment is composed, as its KV is moved.

With the gated delta rule (`delta_rule.py`) and Mamba-2 (`mamba2.py`) a segment is an affine map of
the state in front of it, `S_out = A S_in + B`. `A` and `B` are of the segment alone, so a segment
that moves needs no rotation there. `A` is a matrix of each head, or a number. All kinds have a
short convolution, of which the last inputs are handed on, whatever was in front; some have nothing
else (`short_conv.py`). Nothing but the files of the kinds (the first two share `recurrent.py`), and
`kinds.py`, which tells them apart, knows which is which.

    first prompt     . . a b c d e f . .      its blocks donate KV of the attention layers
    second prompt    . x a b c d e f . y      that KV is known: A and B are noted
    third prompt     z z z a b c d e f z z    KV is moved, S_out = A S_in + B, and z is computed

A segment is reused as a whole or not at all: it has no map of a part. What is between the segments
is computed by the model's own forward, one stretch after the other, each from the state that the
one before has left. What is behind the last one is left to vLLM's step. With the policy `focus`
some segments are then read again (`again.py`).
"""
