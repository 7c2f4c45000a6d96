# SPDX-License-Identifier: Apache-2.0
"""An explained request, to be shown."""

from typing import Any

from segreuse_extras.viewer.asking import Explanation

NASTY = '<script>alert("x")</script> & "quotes" </style>'
"""Text of a prompt that would do harm if it was not escaped."""

STRETCHES: list[dict[str, Any]] = [
    {"start": 0, "tokens": 640, "source": "prefix"},
    {"start": 640, "tokens": 5, "source": "new", "reason": "shorter_than_block"},
    {"start": 645, "tokens": 551, "source": "segment", "position": 1184, "recomputed": [[700, 88]]},
    {"start": 1196, "tokens": 1041, "source": "segment", "position": 1196, "recomputed": []},
    {"start": 2237, "tokens": 300, "source": "new", "reason": "evicted"},
    {"start": 2537, "tokens": 90, "source": "segment", "position": 7, "recomputed": [[2537, 90]]},
    {"start": 2627, "tokens": 1, "source": "new", "reason": "last_token"},
]
REPORT: dict[str, Any] = {
    "policy": "focus",
    "prompt_tokens": 2628,
    "prefix_tokens": 640,
    "reused_tokens": 1682,
    "new_tokens": 306,
    "recomputed_tokens": 178,
    "computed_share": 0.31,
    "matches": 3,
    "bypass_reason": None,
    "drift": 1.25,
    "in_full": False,
    "observed": None,
    "explain": STRETCHES,
}
TEXTS = ["You are helpful.", "No. 7", NASTY, "9. Classes", "Evicted text", "A note", "?"]
EXPLANATION = Explanation(REPORT, TEXTS)
