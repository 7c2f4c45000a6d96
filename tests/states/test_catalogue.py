# SPDX-License-Identifier: Apache-2.0
"""Which segments have maps, and which of a prompt are reused as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segreuse_extras.states.catalogue import LEAST_TOKENS, MapCatalogue
from segreuse_extras.states.finder import WholeSegments
from segreuse_extras.states.messages import Placed
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import Pieces

SPACE, OTHER = 7, 8
SHORTEST = 40


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, count, dtype=np.int32)


A, B, LONG = tokens(50, 1), tokens(60, 2), tokens(90, 3)


def stored(catalogue: MapCatalogue, text: np.ndarray, space: int = SPACE) -> int:
    number, _ = catalogue.order(space, text, "reader", ())
    assert number is not None
    assert catalogue.complete(number)
    return number


def roomy(capacity: int = 9) -> MapCatalogue:
    catalogue = MapCatalogue()
    catalogue.capacity = capacity
    return catalogue


def all_of(prompt: np.ndarray) -> np.ndarray:
    return np.ones(len(prompt), np.bool_)


def test_whole_segments_are_found_wherever_they_are() -> None:
    catalogue = roomy()
    a, b = stored(catalogue, A), stored(catalogue, B)
    prompt = np.concatenate([tokens(7, 4), B, tokens(3, 5), A, A])
    assert catalogue.find(SPACE, prompt, all_of(prompt)) == [
        Placed(b, 7, 67),
        Placed(a, 70, 120),
        Placed(a, 120, 170),
    ]
    assert catalogue.find(OTHER, prompt, all_of(prompt)) == [], "of another namespace"


def test_one_token_without_kv_or_map_and_a_segment_is_computed() -> None:
    catalogue = roomy()
    stored(catalogue, A)
    prompt = np.concatenate([tokens(7, 4), A])
    for missing in (7, 30, 56):
        covered = all_of(prompt)
        covered[missing] = False
        assert catalogue.find(SPACE, prompt, covered) == []
    changed = prompt.copy()
    changed[-1] += 1
    assert catalogue.find(SPACE, changed, all_of(changed)) == []
    assert catalogue.find(SPACE, prompt[:-1], all_of(prompt[:-1])) == []


def test_of_segments_that_begin_alike_the_longest_is_taken() -> None:
    catalogue = roomy()
    part = stored(catalogue, LONG[:50])
    whole = stored(catalogue, LONG)
    assert catalogue.find(SPACE, LONG, all_of(LONG)) == [Placed(whole, 0, 90)]
    short = np.concatenate([LONG[:60], A])
    assert catalogue.find(SPACE, short, all_of(short)) == [Placed(part, 0, 50)]


def test_a_segment_stays_when_one_as_long_that_begins_alike_goes() -> None:
    catalogue = roomy()
    other = np.concatenate([LONG[:50], A[:40]])
    stays, goes = stored(catalogue, LONG), stored(catalogue, other)
    catalogue.remove(goes)
    assert catalogue.find(SPACE, LONG, all_of(LONG)) == [Placed(stays, 0, 90)]
    assert catalogue.find(SPACE, other, all_of(other)) == []


def test_segments_that_overlap_are_not_both_taken() -> None:
    catalogue = roomy()
    whole = stored(catalogue, LONG)
    end = stored(catalogue, LONG[40:])
    assert catalogue.find(SPACE, LONG, all_of(LONG)) == [Placed(whole, 0, 90)]
    covered = all_of(LONG)
    covered[0] = False
    assert catalogue.find(SPACE, LONG, covered) == [Placed(end, 40, 90)]


def test_a_segment_is_ordered_once_and_used_once_it_is_there() -> None:
    catalogue = roomy()
    number, dropped = catalogue.order(SPACE, A, "reader", ())
    assert number is not None
    assert dropped == []
    assert catalogue.order(SPACE, A, "another", ()) == (None, [])
    assert catalogue.find(SPACE, A, all_of(A)) == [], "it is being noted"
    assert catalogue.num_ready == 0
    assert catalogue.complete(number)
    assert catalogue.num_ready == 1
    assert catalogue.order(OTHER, A, "reader", ())[0] is not None, "namespaces share nothing"
    assert catalogue.order(SPACE, A[: LEAST_TOKENS - 1], "reader", ()) == (None, [])


def test_what_was_used_the_longest_ago_makes_room() -> None:
    evicted: list[int] = []
    catalogue = MapCatalogue(evicted.append)
    catalogue.capacity = 2
    a, b = stored(catalogue, A), stored(catalogue, B)
    catalogue.used(a)
    number, dropped = catalogue.order(SPACE, LONG, "reader", ())
    assert number is not None
    assert dropped == [b]
    assert sum(evicted) == 1
    assert catalogue.find(SPACE, A, all_of(A)), "it was used since"
    assert not catalogue.complete(b), "nobody wants its map any more"


def test_what_plans_of_the_step_read_or_others_note_stays() -> None:
    catalogue = roomy(2)
    a = stored(catalogue, A)
    catalogue.order(SPACE, B, "reader", ())
    assert catalogue.order(SPACE, LONG, "another", {a}) == (None, [])
    assert len(catalogue) == 2


def test_nothing_is_ordered_before_the_workers_say_how_large_maps_are() -> None:
    assert MapCatalogue().order(SPACE, A, "reader", ()) == (None, [])


def test_requests_that_end_give_no_maps() -> None:
    catalogue = roomy()
    done = stored(catalogue, A)
    number, _ = catalogue.order(SPACE, B, "reader", ())
    assert catalogue.abandoned("another") == []
    assert catalogue.abandoned("reader") == [number], "its other map is there"
    assert catalogue.find(SPACE, B, all_of(B)) == []
    assert catalogue.clear() == [done]
    assert len(catalogue) == catalogue.num_ready == 0
    assert catalogue.order(SPACE, A, "reader", ())[0] is not None


class Found(Finder):
    """Finds the same pieces, whatever is searched."""

    is_exact = False

    def __init__(self, *rows: list[int]) -> None:
        self.matches = Matches.of(Pieces.from_table([*rows]), 2)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self.matches


def searched(catalogue: MapCatalogue, prompt: np.ndarray, *rows: list[int]) -> Any:
    finder = WholeSegments(Found(*rows), catalogue, SPACE, SHORTEST)
    return finder, finder.find(Prompt(0, prompt), 0, len(prompt) - 1)


PROMPT = np.concatenate([tokens(5, 6), A, B, tokens(9, 7)])


def test_pieces_are_cut_to_segments() -> None:
    """The donor of A goes on behind it, and in front."""
    catalogue = roomy()
    a = stored(catalogue, A)
    finder, found = searched(catalogue, PROMPT, [2, 30, 5, 1, 101], [32, 50, 6, 0, 131])
    assert finder.taken == [Placed(a, 5, 55)]
    assert found.pieces.rows() == [[5, 27, 5, 4, 104], [32, 23, 6, 0, 131]]
    assert found.num_tokens == 50
    assert found.max_depth == 2
    finder.find(Prompt(0, PROMPT), 3, len(PROMPT) - 1)
    assert (finder.taken, finder.spans) == ([Placed(a, 5, 55)], [(2, 52)])


def test_runs_without_a_map_are_told() -> None:
    catalogue = roomy()
    finder, found = searched(catalogue, PROMPT, [5, 50, 1, 0, 0], [55, 60, 2, 0, 300])
    assert found.num_tokens == 0
    assert finder.missed == [(5, 55), (55, 115)], "of two sequences"
    a = stored(catalogue, A)
    finder, found = searched(catalogue, PROMPT, [5, 50, 1, 0, 0], [55, 60, 1, 50, 50])
    assert finder.taken == [Placed(a, 5, 55)]
    assert finder.missed == [(55, 115)]
    finder, _ = searched(catalogue, PROMPT, [55, SHORTEST - 1, 2, 0, 300])
    assert finder.missed == [], "it is too short for a map"


def test_where_there_is_no_room_segments_go_as_a_whole() -> None:
    catalogue = roomy()
    stored(catalogue, A)
    b = stored(catalogue, B)
    rows = [5, 50, 1, 0, 0], [55, 30, 2, 0, 300], [85, 30, 3, 0, 330]
    finder, found = searched(catalogue, PROMPT, *rows)
    assert found.num_tokens == 110
    kept = np.array([False, True, True])
    part = finder.part(Prompt(0, PROMPT), found, kept, 0, 115)
    assert part is not None
    assert finder.taken == [Placed(b, 55, 115)]
    assert part.num_tokens == 60
    part = finder.part(Prompt(0, PROMPT), found, np.array([True, True, False]), 0, 115)
    assert part is not None
    assert part.num_tokens == 50, "a part of B is nothing"


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (40, 60)])
def test_nothing_of_pieces_is_elsewhere(first: int, stop: int) -> None:
    assert len(Pieces.from_table([[5, 35, 1, 0, 0]]).up_to(stop).behind(first)) == 0
