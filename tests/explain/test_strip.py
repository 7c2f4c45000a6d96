# SPDX-License-Identifier: Apache-2.0
"""A strip holds every stretch where it is, and heat where tokens are computed again."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from segreuse_extras.viewer.strip import LEAST_WIDTH, WIDTH, Bar, Cell, Strip, strip
from segreuse_extras.viewer.templating import STATIC
from segreuse_tools.explain import page, stretch_table
from tests.explain.reports import EXPLANATION, NASTY, REPORT, STRETCHES, TEXTS


def test_bars_are_side_by_side_and_none_is_too_narrow_to_be_seen() -> None:
    bars = strip(REPORT).bars
    assert [bar.number for bar in bars] == [*range(1, 8)]
    at = 0.0
    for bar in bars:
        assert bar.x == pytest.approx(at)
        assert bar.width > 0.9 * LEAST_WIDTH
        at += bar.width
    assert at == pytest.approx(WIDTH)
    assert bars[3].width / bars[2].width == pytest.approx(1041 / 551)


def test_a_strip_is_a_thousand_units_wide_and_every_token_may_have_a_cell() -> None:
    stretches = [
        {"start": 0, "tokens": 50, "source": "prefix"},
        {"start": 50, "tokens": 40, "source": "segment", "position": 7, "recomputed": [[59, 2]]},
        {"start": 90, "tokens": 10, "source": "new", "reason": "unknown"},
    ]
    report = REPORT | {"explain": stretches, "prompt_tokens": 100}
    heat = [Cell(590.0, 10.0, 1.0), Cell(600.0, 10.0, 1.0)]
    new = "new: not seen in this namespace"
    assert strip(report, ["a \n b", "c", ""]) == Strip(
        [
            Bar(1, "prefix", 0.0, 500.0, 0, 50, "prefix cache", "", False, "a b", []),
            Bar(
                2, "segment-0", 500.0, 400.0, 50, 40, "segment, moved by +43", "5%", True, "c", heat
            ),
            Bar(3, "new", 900.0, 100.0, 90, 10, new, "", False, "", []),
        ],
        "1,682 of 100 tokens (1682%) were reused with focus, 178 of these computed again: 31% of "
        "the work behind the prefix.",
        100,
        True,
    )


def test_a_single_token_of_many_is_five_units_wide() -> None:
    stretches = [
        {"start": 0, "tokens": 999, "source": "prefix"},
        {"start": 999, "tokens": 1, "source": "new", "reason": "last_token"},
    ]
    first, last = strip(REPORT | {"explain": stretches}).bars
    assert last.width == pytest.approx(1000 * 5 / (999 + 5))
    assert first.width == pytest.approx(1000 - last.width)


def test_cells_are_four_units_wide_where_tokens_are_narrower() -> None:
    segment = {"start": 5, "tokens": 4000, "source": "segment", "position": 5}
    bars = strip(REPORT | {"explain": [segment | {"recomputed": [[5, 8], [21, 16]]}]}).bars
    assert bars[0].heat == [Cell(0.0, 4.0, 0.5), Cell(4.0, 4.0, 1.0)]


def test_every_colour_has_a_style() -> None:
    many = [STRETCHES[2] | {"start": 551 * i, "recomputed": None} for i in range(9)]
    bars = strip(REPORT | {"explain": [*many, *STRETCHES]}).bars
    style = (STATIC / "viewer.css").read_text(encoding="utf-8")
    assert {bar.colour for bar in bars} >= {f"segment-{number}" for number in range(4)}
    assert all(f".{bar.colour} {{" in style for bar in bars)


def test_neighbouring_segments_differ_in_colour() -> None:
    many = [STRETCHES[2] | {"start": 551 * i, "recomputed": None} for i in range(9)]
    colours = [bar.colour for bar in strip(REPORT | {"explain": many}).bars]
    assert all(one != other for one, other in pairwise(colours))
    named = [bar.colour for bar in strip(REPORT).bars]
    assert named == ["prefix", "new", "segment-0", "segment-1", "new", "segment-2", "new"]


def test_similar_text_is_told_from_segments() -> None:
    similar = STRETCHES[2] | {"source": "similar"}
    found = strip(REPORT | {"explain": [*STRETCHES[:2], similar, *STRETCHES[3:]]})
    assert [bar.colour for bar in found.bars[2:4]] == ["similar", "segment-0"]
    assert found.bars[2].source == "similar text, moved by -539"
    assert found.bars[2].heat
    rejected = strip(REPORT | {"explain": [similar | {"rejected": True}]})
    assert rejected.bars[0].source == "similar text, moved by -539, rejected by the test"
    explained = type(EXPLANATION)(REPORT | {"explain": [similar]}, [])
    legend = "equal tokens of similar text"
    assert legend in page.render(explained, "x")
    assert legend not in page.render(EXPLANATION, "x")
    with (console := Console()).capture() as capture:
        console.print(stretch_table.table(explained))
    assert "similar text" in capture.get()


def test_heat_is_where_tokens_are_computed_again() -> None:
    bars = strip(REPORT).bars
    segment = bars[2]
    per_token = segment.width / 551
    first, last = segment.heat[0], segment.heat[-1]
    assert segment.x + 55 * per_token - first.width < first.x <= segment.x + 55 * per_token
    assert last.x < segment.x + (55 + 88) * per_token < last.x + 2 * last.width
    assert any(cell.share == pytest.approx(1) for cell in segment.heat)
    assert bars[3].heat == []
    assert sum(cell.width for cell in bars[5].heat) == pytest.approx(bars[5].width)
    assert {round(cell.share, 6) for cell in bars[5].heat} == {1}


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 50)), max_size=30),
    st.integers(1, 5000),
)
def test_heat_adds_up_to_the_recomputed_tokens(
    tokens: int, wanted: list[tuple[int, int]], other: int
) -> None:
    runs, end = [], 10
    for gap, length in sorted(wanted):
        first = max(end, 10 + gap)
        length = min(length, 10 + tokens - first)
        if length > 0:
            runs.append([first, length])
            end = first + length
    segment = {"start": 10, "tokens": tokens, "source": "segment", "position": 0}
    rest = {"start": 10 + tokens, "tokens": other, "source": "new", "reason": "unknown"}
    prefix = {"start": 0, "tokens": 10, "source": "prefix"}
    explain = [prefix, segment | {"recomputed": runs}, rest]
    bar = strip(REPORT | {"explain": explain}).bars[1]
    heat = sum(cell.share * cell.width for cell in bar.heat)
    assert heat / bar.width * tokens == pytest.approx(sum(n for _, n in runs), abs=1e-3)
    assert all(cell.share <= 1 + 1e-9 for cell in bar.heat)


def test_what_is_not_known_has_no_heat_and_the_legend_says_so() -> None:
    unknown = [stretch | {"recomputed": None} for stretch in STRETCHES]
    found = strip(REPORT | {"explain": unknown})
    assert not found.measured
    assert [bar.heat for bar in found.bars] == [[]] * 7
    shown = page.render(type(EXPLANATION)(REPORT | {"explain": unknown}, []), "request.json")
    assert "is not known" in shown
    assert "is not known" not in page.render(EXPLANATION, "request.json")


def test_labels_are_sentences() -> None:
    labels = [bar.label for bar in strip(REPORT).bars]
    assert labels[2] == "3. tokens 645 to 1,195: segment, moved by -539, 16% computed again"
    assert labels[6] == "7. token 2,627: new: the last token is always computed"


def test_similar_text_has_a_colour_and_heat() -> None:
    similar = [s | {"source": "similar"} if s["source"] == "segment" else s for s in STRETCHES]
    found, equal = strip(REPORT | {"explain": similar}), strip(REPORT)
    assert found.bars[2].label == (
        "3. tokens 645 to 1,195: similar text, moved by -539, 16% computed again"
    )
    assert found.bars[2].colour == "similar"
    assert [bar.heat for bar in found.bars] == [bar.heat for bar in equal.bars]
    shown = page.render(type(EXPLANATION)(REPORT | {"explain": similar}, []), "request.json")
    assert "equal tokens of similar text" in shown
    assert "equal tokens of similar text" not in page.render(EXPLANATION, "request.json")


def test_text_is_escaped_wherever_it_comes_from() -> None:
    shown = page.render(EXPLANATION, NASTY)
    assert NASTY not in shown
    assert shown.count("<script>") == shown.count("</script>") == 1
    assert shown.count("</style>") == 1
    assert "&lt;script&gt;alert" in shown


def test_a_page_names_no_host_and_allows_nothing_but_its_own_script_and_style() -> None:
    shown = page.render(EXPLANATION, "request.json")
    assert not re.search(r"<(?:link|img)|\ssrc=|url\(|@import", shown)
    assert all(target.startswith("#") for target in re.findall(r'href="(.*?)"', shown))
    assert "//" not in re.sub(r"<script>.*</script>", "", shown, flags=re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', shown)
    assert policy is not None
    assert "default-src &#39;none&#39;" in policy[1] or "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_each_text_is_in_its_row() -> None:
    rows = re.findall(r'<tr id="stretch-\d+">.*</tr>', page.render(EXPLANATION, "x"))
    assert len(rows) == len(TEXTS)
    assert all(text in row for text, row in zip(TEXTS, rows, strict=True) if text != NASTY)
