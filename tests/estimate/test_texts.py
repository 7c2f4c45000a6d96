# SPDX-License-Identifier: Apache-2.0
"""Estimates as a person reads them, line for line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segreuse_tools.estimate.comparison import Cache, Estimate, Row
from segreuse_tools.estimate.edited_turns import EditedTurns
from segreuse_tools.estimate.estimate_text import as_text
from segreuse_tools.estimate.gain import PREFIX, Gain, PolicyRow, SizeRow
from segreuse_tools.estimate.gain_text import print_gain, size_name
from segreuse_tools.estimate.request_log import Reason

REASONS = tuple(Reason(f"reason {n}", 3000 - 200 * n, [n]) for n in range(1, 14))


def prefix_row(share: float, times: tuple[float, float] | None = None) -> PolicyRow:
    return PolicyRow(PREFIX, 1 - share, 0.0, 0.0, times)


SMALL = SizeRow(
    cache_tokens=300_000,
    is_capped=False,
    prefix_share=0.1,
    any_position_share=0.62,
    any_position_prefix_share=0.08,
    tier_prefix_share=0.04,
    tier_any_position_share=0.2,
    whole_prefix_share=0.11,
    whole_reordered_share=0.3,
    whole_any_position_share=0.75,
    whole_computed_share=0.35,
    too_long=1234,
    policies=(prefix_row(0.1, (1.25, 12.5)), PolicyRow("shift", 0.38, 0.5, 0.0, (0.0004, 0.0126))),
)
UNLIMITED = replace(
    SMALL,
    cache_tokens=None,
    is_capped=True,
    prefix_share=0.2,
    any_position_share=0.7,
    tier_prefix_share=None,
    tier_any_position_share=None,
    whole_prefix_share=0.25,
    whole_reordered_share=0.4,
    whole_any_position_share=0.8,
    whole_computed_share=0.25,
    too_long=0,
    policies=(prefix_row(0.2, (1.0, 9.0)), PolicyRow("shift", 0.3, 0.5, 0.0, (0.3, 0.9))),
)
GAIN = Gain(
    format="hash ids",
    requests=12_345,
    prompt_tokens=67_890_123,
    median_tokens=5499,
    left_out=REASONS[:2],
    out_of_order=REASONS[2:3],
    turns=EditedTurns(1200, 900, 200, 6_789_012, 5_000_000),
    block_size=16,
    engines=2,
    router="documents",
    tier_tokens=2_000_000,
    sizes=(SMALL, UNLIMITED),
)
GAIN_TEXT = """\
log       hash ids: 12,345 requests, 67,890,123 prompt tokens (median about 5,499)
left out  2,800 requests (lines 1, ...): reason 1
left out  2,600 requests (lines 2, ...): reason 2
sorted    2,400 requests (lines 3, ...): reason 3
turns     1,200 prompts have one before in their session: 900 add to it, 200 edit it, 100 do neither
          behind edits stand 6,789,012 tokens, 10.0% of all prompt tokens;
          73.6% of them stood in the prompt before, and are no prefix
caches    blocks of 16 tokens, 2 engines, by documents, and a tier of 2M tokens

known prompt tokens, by the tokens of KV that a cache holds

                              300K   unlimited
 ─────────────────────────────────────────────
 prefix caching              10.0%       20.0%
   more in the tier           4.0%
 any position, this plugin   62.0%       70.0%
   more in the tier          20.0%
 whole components: prefix    11.0%       25.0%
   passages reordered        30.0%       40.0%
   any position              75.0%       80.0%

this plugin: prefix hits and segments, which it copies, so that each prompt has its own;
whole components: each held once, which bounds what reuse at any position knows;
work: (token, layer) pairs, in percent of those of all prompt tokens.

work that is left

                                                  300K                    unlimited
 ──────────────────────────────────────────────────────────────────────────────────
 prefix caching            90.0%  1,250 ms / 12,500 ms   80.0%  1,000 ms / 9,000 ms
 shift                             38.0%  0 ms / 13 ms       30.0%  300 ms / 900 ms
 whole components, shift                         35.0%                        25.0%

times: of the prefill, half / 90 % of the prompts; waiting and copying not counted.
In Mooncake's traces an id stands for a block and all in front of it: text that moves is not seen.
1,234 requests do not fit into 300K tokens, and find nothing there.
unlimited: the largest that is tried, 16,777,216 tokens, was full.
"""
PLAIN_ROW = SizeRow(
    *(16, False, 0.5, 0.519, 0.5, None, None, None, None, None, None, 0),
    policies=(prefix_row(0.5), PolicyRow("focus", 0.481, 0.019, 0.01)),
)
PLAIN_GAIN = replace(
    GAIN,
    format="WEKA conversations",
    left_out=REASONS,
    out_of_order=(),
    turns=EditedTurns(),
    engines=1,
    tier_tokens=0,
    sizes=(PLAIN_ROW,),
)
PLAIN_GAIN_TEXT = """\
log       WEKA conversations: 12,345 requests, 67,890,123 prompt tokens (median about 5,499)
left out  2,800 requests (lines 1, ...): reason 1
left out  2,600 requests (lines 2, ...): reason 2
left out  2,400 requests (lines 3, ...): reason 3
left out  2,200 requests (lines 4, ...): reason 4
left out  2,000 requests (lines 5, ...): reason 5
left out  1,800 requests (lines 6, ...): reason 6
left out  1,600 requests (lines 7, ...): reason 7
left out  1,400 requests (lines 8, ...): reason 8
left out  1,200 requests (lines 9, ...): reason 9
left out  1,000 requests (lines 10, ...): reason 10
left out  1,800 for 3 other reasons (--json has all)
caches    blocks of 16 tokens, 1 engine

known prompt tokens, by the tokens of KV that a cache holds

                                16
 ─────────────────────────────────
 prefix caching              50.0%
 any position, this plugin   51.9%

this plugin: prefix hits and segments, which it copies, so that each prompt has its own;
work: (token, layer) pairs, in percent of those of all prompt tokens.

work that is left

                     16
 ──────────────────────
 prefix caching   50.0%
 focus            48.1%

Ids are of one conversation: what conversations share is not seen.
Nearly all that is known is a prefix: reuse at any position adds nothing here. A second tier, or a \
larger cache, keeps prefixes for longer.
"""


@pytest.mark.parametrize(
    ("gain", "text"), [(GAIN, GAIN_TEXT), (PLAIN_GAIN, PLAIN_GAIN_TEXT)], ids=["full", "plain"]
)
def test_an_estimate_without_an_engine(
    gain: Gain, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_gain(gain)
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == text.splitlines()


@pytest.mark.parametrize(
    ("shares", "is_said"),
    [((0.0199, None), True), ((0.02, None), False), ((0.0, 0.02), False), ((0.0, 0.0199), True)],
)
def test_a_gain_of_two_percent_by_either_count_is_one(
    shares: tuple[float, float | None], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found, whole = shares
    row = replace(
        PLAIN_ROW, prefix_share=0.0, any_position_share=found, whole_any_position_share=whole
    )
    print_gain(replace(GAIN, sizes=(replace(row, any_position_share=0.5), row)))
    assert ("adds nothing here" in capsys.readouterr().out) is is_said


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        *((None, "unlimited"), (16, "16"), (999, "999"), (1000, "1K"), (1001, "1,001")),
        *((1_500_000, "1,500K"), (1_000_000, "1M"), (3_000_000_000, "3,000M")),
    ],
)
def test_sizes_have_the_largest_unit_that_divides_them(tokens: int | None, name: str) -> None:
    assert size_name(tokens) == name


# With an engine.

ROWS = (
    Row(None, 1000, 0, 0, 9000.0, 0, {}, False, 5321, 1, 99),
    Row("shift", 900, 5000, 0, 4100.0, 1200, {}, False, 7, 2, 99),
    Row("focus", 910, 5100, 405, 4500.4, 11, {"nothing_saved": 1020, "x": 2}, True, 0, 0, 99),
)
ESTIMATE = Estimate(
    requests=1312,
    prompt_tokens=10_000,
    median_tokens=1234,
    with_extra_keys=1300,
    namespaces=2,
    left_out=REASONS,
    concurrency=None,
    cache=Cache(2000, 16, 1.25, True, False),
    has_tier=True,
    rows=ROWS,
)
ESTIMATE_TEXT = """\
log       1,312 requests, 10,000 prompt tokens (median 1,234), 1,300 with extra keys, 2 namespaces
left out  2,800 requests (lines 1, ...): reason 1
left out  2,600 requests (lines 2, ...): reason 2
left out  2,400 requests (lines 3, ...): reason 3
left out  2,200 requests (lines 4, ...): reason 4
left out  2,000 requests (lines 5, ...): reason 5
left out  1,800 requests (lines 6, ...): reason 6
left out  1,600 requests (lines 7, ...): reason 7
left out  1,400 requests (lines 8, ...): reason 8
left out  1,200 requests (lines 9, ...): reason 9
left out  1,000 requests (lines 10, ...): reason 10
left out  1,800 requests for 3 other reasons (--json has all)
order     at the logged times
KV cache  2,000 blocks of 16 tokens (32,000 tokens, 1.2 GiB on each device)

                      prefix  reused  recomputed  computed  requests  evicted
prefix caching alone   10.0%                         90.0%              5,321
shift                   9.0%   50.0%        0.0%     41.0%     1,200        7
focus (default) *       9.1%   51.0%        4.0%     45.0%        11        0

prefix: found by prefix caching; reused: segments, at any position; recomputed: of these;
computed: work that is left, of (token, layer) pairs. All in percent of the prompt tokens.
requests: that reuse segments; evicted: cached KV blocks.
* planned: a pass may choose fewer tokens (peaks), or compute all of them (max_drift).
The second tier is not replayed: what is evicted counts as lost.
prefix caching alone: running requests lost their blocks 1 time
shift: running requests lost their blocks 2 times
bypassed with focus: nothing_saved 1,020, x 2"""
PLAIN_ESTIMATE = replace(
    ESTIMATE,
    with_extra_keys=0,
    namespaces=1,
    left_out=(*REASONS[:10], Reason("last", 1, [7])),
    concurrency=1200,
    cache=Cache(2000, 16, None, False, False),
    has_tier=False,
    rows=(replace(ROWS[0], preemptions=0), replace(ROWS[1], preemptions=0, bypassed={"y": 3})),
)
PLAIN_ESTIMATE_TEXT = """\
order     1,200 at a time
KV cache  2,000 blocks of 16 tokens (32,000 tokens): as large as the log needs

                      prefix  reused  recomputed  computed  requests  evicted
prefix caching alone   10.0%                         90.0%              5,321
shift                   9.0%   50.0%        0.0%     41.0%     1,200        7

prefix: found by prefix caching; reused: segments, at any position; recomputed: of these;
computed: work that is left, of (token, layer) pairs. All in percent of the prompt tokens.
requests: that reuse segments; evicted: cached KV blocks.
bypassed with shift: y 3
No request names extra_keys, so nothing would be looked up: --extra-keys NAME assumes one \
namespace for all."""


def test_an_estimate_of_an_engine() -> None:
    assert as_text(ESTIMATE, "focus") == ESTIMATE_TEXT


def test_an_estimate_of_an_engine_with_less_to_say() -> None:
    """Of a policy that was not replayed, the last one's bypasses are said."""
    first, *_, other, rest = as_text(PLAIN_ESTIMATE, "focus").split("\n", 12)
    assert first.endswith(", 0 with extra keys, 1 namespace")
    assert other == "left out  1 request for 1 other reason (--json has all)"
    assert rest == PLAIN_ESTIMATE_TEXT


def test_the_largest_cache_that_is_tried_is_said() -> None:
    capped = replace(ESTIMATE, cache=Cache(2000, 16, None, False, True))
    assert as_text(capped, "focus").splitlines()[13] == (
        "KV cache  2,000 blocks of 16 tokens (32,000 tokens): the largest that is tried; the log "
        "may need more: give --kv-gib"
    )
