# SPDX-License-Identifier: Apache-2.0
"""Which donors a plan gives up where they do not all fit beside its request.

A donor that nobody else holds takes a free block while it is read, however little is read of it. So
those go first of which the least is read: the ends of segments. Among equals it is similar text
before equal text, text read elsewhere before text in its own context, then the smaller segment, and
of a segment its end, so that what is left stays in one part. What is restored goes last: it is
exact, and nothing of it is computed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from vllm_segreuse.plan import BoolArray, Pieces, Tier


def kept_without(
    pieces: Pieces, idle: Collection[int], missing: int, exact_until: int, from_end: bool
) -> BoolArray:
    """Which pieces are left once so many donors are given up; bool `[n]`.

    Args:
        pieces: all that would be copied.
        idle: donors that nobody holds.
        missing: how many of these have to go.
        exact_until: pieces in front of it are restored.
        from_end: give up what stands last, whatever it is: the plan ends in front of it.
    """
    takes_room = (pieces.source == Tier.GPU) & np.isin(pieces.block, list(idle))
    blocks, which = np.unique(pieces.block[takes_room], return_inverse=True)
    some = pieces.where(takes_room)
    segment = pieces.segment
    worth = [  # the last one counts first
        -some.destination,
        np.bincount(segment, weights=pieces.length)[segment[takes_room]],
        some.in_context,
        ~some.is_similar,
        np.bincount(which, weights=some.length)[which],
        some.destination < exact_until,
    ]
    order = np.lexsort(worth[:1] if from_end else worth)
    best = np.zeros(len(blocks), np.int64)  # of a block that is read at several places
    np.maximum.at(best, which[order], np.arange(len(order)))
    given_up = blocks[np.argsort(best)[:missing]]
    return np.asarray(~(takes_room & np.isin(pieces.block, given_up)), np.bool_)
