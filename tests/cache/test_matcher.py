# SPDX-License-Identifier: Apache-2.0
"""Matches are right, complete, as long as they can be, and chosen by the documented order.

The properties are checked in plain Python against a model that knows nothing of hashes or links.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.integrity import check_integrity
from tests.cache.choice import Choice, View
from vllm_segreuse.cache import assembly, matcher
from vllm_segreuse.cache import index as index_module
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches, find_matches, warm_up
from vllm_segreuse.cache.rolling_hash import window_hashes

BLOCKS = 16


class Model:
    """The index as anyone would write it, with a list scan for everything."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.views: dict[int, dict[int, View]] = {}  # by block, then by namespace
        self.step = 0

    def view(self, namespace: int, block: int) -> View | None:
        return self.views.get(block, {}).get(namespace)

    def known(self, namespace: int) -> dict[int, View]:
        return {b: views[namespace] for b, views in self.views.items() if namespace in views}

    def remove(self, block: int) -> None:
        self.views.pop(block, None)
        for views in self.views.values():
            for namespace, view in views.items():
                if view.parent == block:
                    views[namespace] = view._replace(parent=-1)

    def insert(self, namespace, ids, tokens, position, parent, depth) -> None:
        for i, block in enumerate(ids):
            content = tuple(tokens[i * self.size : (i + 1) * self.size]), position, depth
            if any(view[:3] != content for view in self.views.get(block, {}).values()):
                self.remove(block)
            above = self.view(namespace, parent)
            if above is None or above.position + self.size != position:
                parent = -1
            views = self.views.setdefault(block, {})
            step = next((view.step for view in views.values()), self.step)
            known = views.get(namespace)
            if known is None or known.parent < 0:
                views[namespace] = View(*content, step, parent)
            parent, position = block, position + self.size

    def donors(self, namespace: int, max_depth: int) -> dict[int, View]:
        return {
            block: view
            for block, view in self.known(namespace).items()
            if view.depth <= max_depth and view.step < self.step
        }


def match(index, namespace, prompt, start=0, stop=None, max_depth=9) -> Matches:
    tokens = np.array(prompt, np.int32)
    hashes = matcher_hashes(tokens, index.block_size)
    stop = len(prompt) if stop is None else stop
    return find_matches(index, namespace, tokens, hashes, start, stop, max_depth)


def matcher_hashes(tokens, width):
    """As the index hashes, so that a test can make everything collide."""
    return index_module.window_hashes(tokens, width)


def check(model: Model, matches: Matches, namespace, prompt, start, stop, max_depth) -> None:
    donors = model.donors(namespace, max_depth)
    known = model.known(namespace)
    choice = Choice(known, donors, model.size, tuple(prompt), start, stop)
    assert matches.pieces.rows() == choice.pieces()
    pieces = [tuple(piece) for piece in matches.pieces.rows()]
    covered = check_pieces(model, donors, pieces, prompt, start, stop)
    check_coverage(model, donors, covered, prompt, start, stop)
    joints = [
        one[0] + one[1] == two[0] and one[4] + one[1] == two[4] and donors[two[2]].parent == one[2]
        for one, two in pairwise(pieces)
    ]
    check_growth(model, donors, pieces, joints, prompt, start, stop)
    goes_on = [False, *joints][: len(pieces)]
    assert matches.pieces.kept.tolist() == choice.kept(matches.pieces.rows(), goes_on)
    assert matches.num_tokens == len(covered)
    assert matches.num_segments == len(pieces) - sum(joints)
    assert matches.max_depth == max((donors[piece[2]].depth for piece in pieces), default=0)


def check_pieces(model, donors, pieces, prompt, start, stop) -> set[int]:
    """Every piece is a true copy, inside of one eligible donor and of the range."""
    covered: set[int] = set()
    end = start
    for destination, length, block, offset, position in pieces:
        assert block in donors
        assert length >= 1
        assert destination >= end
        end = destination + length
        assert 0 <= offset <= offset + length <= model.size
        assert position == donors[block].position + offset
        assert tuple(prompt[destination:end]) == donors[block].tokens[offset : offset + length]
        covered.update(range(destination, end))
    assert end <= max(start, stop)
    return covered


def check_coverage(model, donors, covered, prompt, start, stop) -> None:
    """Every window that some donor could serve is served."""
    contents = {entry.tokens for entry in donors.values()}
    for window in range(len(prompt) - model.size + 1):
        if tuple(prompt[window : window + model.size]) in contents:
            wanted = range(max(start, window), min(stop, window + model.size))
            assert covered.issuperset(wanted), f"window {window} is not covered"


def check_growth(model, donors, pieces, joints, prompt, start, stop) -> None:
    """No run could have been one token longer, on either side."""
    for i, (destination, length, block, offset, _) in enumerate(pieces):
        end = destination + length
        if end < stop and not (i < len(joints) and joints[i]):
            if offset + length < model.size:
                following = {donors[block].tokens[offset + length]}
            else:
                following = {e.tokens[0] for e in donors.values() if e.parent == block}
            assert prompt[end] not in following, f"piece {i} stops too early"
        floor = sum(pieces[i - 1][:2]) if i else start
        if destination > floor and not (i and joints[i - 1]):
            if offset:
                before = donors[block].tokens[offset - 1]
            else:
                parent = donors.get(donors[block].parent)
                before = parent.tokens[-1] if parent else None
            assert prompt[destination - 1] != before, f"piece {i} begins too late"


@st.composite
def scenarios(draw):
    """Insertions of similar sequences, some of them known in several namespaces, with evictions
    between them, and a prompt made of them."""
    size = draw(st.integers(1, 4))
    token = st.integers(0, draw(st.sampled_from([1, 1, 2, 5])))
    operations, sequences = [], []
    for _ in range(draw(st.integers(1, 9))):
        kinds = ["insert", "insert", "insert", "branch", "share", "share", "remove", "step"]
        kind = draw(st.sampled_from(kinds))
        ids = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5, unique=True))
        tokens = draw(st.lists(token, min_size=size * len(ids), max_size=size * len(ids)))
        if kind in ("insert", "branch"):
            sequences.append(tokens)
            parent = draw(st.integers(0, BLOCKS - 1)) if kind == "branch" else -1
            where = draw(st.integers(0, 2))
            depth, namespace = draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 0, 1]))
            operations.append((kind, namespace, ids, tokens, where, parent, depth))
        elif kind == "share":
            operations.append((kind, draw(st.integers(0, 2)), draw(st.integers(0, 8))))
        else:
            operations.append((kind, ids))
    cuts = st.tuples(st.sampled_from(sequences or [[0]]), st.integers(0, 5), st.integers(1, 20))
    prompt: list[int] = []
    for sequence, begin, length in draw(st.lists(cuts, min_size=1, max_size=4)):
        prompt += draw(st.lists(token, max_size=2)) + sequence[begin : begin + length]
    start = draw(st.integers(0, len(prompt)))
    return size, operations, prompt, start // 2, draw(st.integers(start, len(prompt)))


def play(size: int, operations: list[tuple]) -> tuple[SegmentIndex, Model]:
    index, model = SegmentIndex(BLOCKS, size), Model(size)
    for kind, *arguments in [*operations, ("step", [])]:
        if kind == "step":
            index.begin_step()
            model.step += 1
        elif kind == "remove":
            for block in arguments[0]:
                assert index.remove([block]) == (block in model.views)
                model.remove(block)
        elif kind == "share":
            share(index, model, *arguments)
        else:
            namespace, ids, tokens, where, parent, depth = arguments
            position = where * size
            if kind == "branch" and parent in model.views:
                namespace, above = next(iter(model.views[parent].items()))
                position = above.position + size
            arrays = np.array(ids, np.int32), np.array(tokens, np.int32)
            index.insert(namespace, *arrays, position, parent, depth)
            model.insert(namespace, ids, tokens, position, parent, depth)
    return index, model


def share(index: SegmentIndex, model: Model, namespace: int, which: int) -> None:
    """Another namespace meets a stored sequence, up to some block of it: a prefix hit."""
    if not model.views:
        return
    first_views = {block: next(iter(views.values())) for block, views in model.views.items()}
    path = [sorted(first_views)[which % len(first_views)]]
    while first_views[path[0]].parent >= 0:
        path.insert(0, first_views[path[0]].parent)
    views = [first_views[block] for block in path]
    index.insert(
        namespace,
        np.array(path, np.int32),
        np.array([token for view in views for token in view.tokens], np.int32),
        views[0].position,
        depths=np.array([view.depth for view in views], np.int8),
    )
    for block, above, view in zip(path, [-1, *path], views, strict=False):
        model.insert(namespace, [block], view.tokens, view.position, above, view.depth)


@pytest.mark.parametrize("colliding", [False, True], ids=["hashed", "all keys collide"])
@settings(max_examples=200)
@given(
    scenario=scenarios(),
    namespace=st.sampled_from([0, 0, 1]),
    max_depth=st.integers(0, 2),
    fresh=st.booleans(),
)
def test_08_matches_are_right_complete_and_maximal(
    colliding, scenario, namespace, max_depth, fresh
):
    size, operations, prompt, start, stop = scenario
    with pytest.MonkeyPatch.context() as patch:
        if colliding:
            make_everything_collide(patch)
        index, model = play(size, operations)
        if fresh:
            last = operations[-1]
            if last[0] == "insert":  # once more, and not computed yet
                _, owner, ids, tokens, where, _, depth = last
                arrays = np.array(ids, np.int32), np.array(tokens, np.int32)
                index.insert(owner, *arrays, (where + 1) * size, -1, depth)
                model.insert(owner, ids, tokens, (where + 1) * size, -1, depth)
        check_integrity(index)
        matches = match(index, namespace, prompt, start, stop, max_depth)
        check(model, matches, namespace, prompt, start, stop, max_depth)


def make_everything_collide(patch: pytest.MonkeyPatch) -> None:
    """Only the comparison of tokens and namespaces is left to tell blocks apart."""

    def constant(dtype):
        return lambda tokens, width: np.ones(max(0, tokens.size - width + 1), dtype)

    for module in (index_module, matcher):
        patch.setattr(module, "window_anchors", constant(np.uint32))
        patch.setattr(module, "salt_of", lambda namespace: np.uint64(0))
    patch.setattr(index_module, "window_hashes", constant(np.uint64))


def seeded(seed):
    return lambda tokens, width: window_hashes(tokens, width, seed)


@given(scenario=scenarios())
def test_08_the_hash_changes_nothing_but_speed(scenario):
    size, operations, prompt, start, stop = scenario
    results = []
    for seed in (None, 1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if seed is None:
                make_everything_collide(patch)
            else:
                patch.setattr(index_module, "window_hashes", seeded(np.uint64(seed)))
            index, _ = play(size, operations)
            matches = match(index, 0, prompt, start, stop)
            results.append((matches.pieces.rows(), *matches[1:]))
    assert results[0] == results[1] == results[2]


@given(scenario=scenarios())
def test_09_other_namespaces_change_nothing(scenario):
    """What namespace 0 finds is what it would find if the others did not share its blocks."""
    size, operations, prompt, start, stop = scenario
    shared, _ = play(size, operations)
    alone, _ = play(size, [o for o in operations if o[0] != "share" or o[1] == 0])
    one, other = (match(index, 0, prompt, start, stop) for index in (shared, alone))
    assert one.pieces.rows() == other.pieces.rows()
    assert one[1:] == other[1:]


def build(*sequences: tuple, size: int = 4, blocks: int = 64) -> SegmentIndex:
    """Index sequences of (tokens, keyword arguments of insert), with ids 0, 1, 2, ... in order."""
    index, following = SegmentIndex(blocks, size), 0
    for tokens, options in sequences:
        ids = np.arange(following, following + len(tokens) // size, dtype=np.int32)
        following += len(ids)
        options = {"namespace": 0, "first_position": 0, **options}
        index.insert(block_ids=ids, tokens=np.array(tokens, np.int32), **options)
    index.begin_step()
    return index


LETTERS = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz.")}


def spell(text: str) -> list[int]:
    return [LETTERS[letter] for letter in text]


def test_12_a_segment_at_an_odd_offset_grows_across_block_borders():
    index = build((spell("xxabcdefghijzz.."), {"first_position": 40}))
    matches = match(index, 0, spell("...abcdefghij.."))
    assert matches.pieces.rows() == [[3, 2, 0, 2, 42], [5, 4, 1, 0, 44], [9, 4, 2, 0, 48]]
    assert matches[1:] == (10, 1, 0)


def test_12_the_same_segment_twice_is_found_twice():
    index = build((spell("abcdefgh"), {}))
    matches = match(index, 0, spell("abcdefgh.abcdefgh"))
    assert matches.pieces.block.tolist() == [0, 1, 0, 1]
    assert matches.pieces.destination.tolist() == [0, 4, 9, 13]
    assert matches.num_segments == 2


def test_12_two_donors_side_by_side_are_two_segments():
    """Also where each is as far from its place as the other."""
    index = build((spell("xxxxabcd...."), {}), (spell("........efgh"), {}))
    matches = match(index, 0, spell("..abcdefgh"))
    assert matches.pieces.rows() == [[2, 4, 1, 0, 4], [6, 4, 5, 0, 8]]
    assert matches.num_segments == 2
    assert matches.pieces.segments(0).first.tolist() == [2, 6]


def test_a_window_that_begins_before_the_range_serves_what_lies_inside():
    index = build((spell("abcd"), {"first_position": 8}))
    for start, stop in ((1, 3), (3, 4), (0, 1)):
        matches = match(index, 0, spell("abcd"), start, stop)
        assert matches.pieces.rows() == [[start, stop - start, 0, start, 8 + start]]


def test_12_the_run_that_continues_is_preferred():
    # "efgh" exists twice; the shallower, lower id would win if the run did not continue.
    index = build((spell("efgh"), {}), (spell("abcdefgh"), {"depths": 1}))
    matches = match(index, 0, spell("abcdefgh"))
    assert matches.pieces.block.tolist() == [1, 2]


def test_12_then_the_longest_equal_left_context():
    index = build(
        (spell("zzzzefgh"), {}),
        (spell("zzcdefgh"), {"depths": 1}),
        (spell("zzzdefgh"), {}),
        (spell("zabczzzdefgh"), {}),  # more is equal, but behind a difference
    )
    matches = match(index, 0, spell("abcdefgh"), start=4)  # the context lies before the range
    assert matches.pieces.rows() == [[4, 4, 3, 0, 4]]
    assert matches.max_depth == 1


def test_12_the_left_context_is_compared_through_equal_blocks():
    index = build(
        (spell("yyyyyyyycdefghijklmn"), {}),
        (spell("zzabcdefghijklmn"), {"depths": 1}),
    )
    matches = match(index, 0, spell("..abcdefghijklmn"), start=12)
    assert matches.pieces.rows() == [[12, 4, 8, 0, 12]]


# Three documents of a prompt, and text that is not in it.
A, B, C, FILLER = "abcdefgh", "ijklmnop", "qrstuvwx", "zzyyzzyy"


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (C, B + C),
        (B + C, A + B + C),
        (FILLER + FILLER + FILLER + C, A + C),
        (FILLER + B + C, B + FILLER + A + C),
        ("...." + A + C, ".." + A + ".." + B + C),
    ],
    ids=["alone", "fewer", "unrelated", "in any order", "at any offset"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_12_then_the_most_text_of_the_prompt_in_front(worse, better, turned):
    # All documents are behind new text, so that left context is never equal. Depth is for the
    # worse donor; block id is, too, unless they are turned.
    stored = [better, worse] if turned else [worse, better]
    index = build(*((spell(text), {"depths": int(text == better)}) for text in stored))
    prompt = f"..{B}..{A}..{C}"
    matches = match(index, 0, spell(prompt))
    position = {piece[0]: piece[4] for piece in matches.pieces.rows()}
    assert position[prompt.index(C)] == better.index(C)


@pytest.mark.parametrize("shift", ["", "z", "zz", "zzz"])
@pytest.mark.parametrize("turned", [False, True])
def test_12_donors_are_compared_wherever_the_text_is_in_their_blocks(shift, turned):
    alone, behind = f"zzzz{C}zzzz", f"zzz{shift}{A}{C}yyyy"
    stored = [behind, alone] if turned else [alone, behind]
    index = build(*((spell(text[: len(text) // 4 * 4]), {}) for text in stored))
    matches = match(index, 0, spell(f"{A}..{C}"), start=10)
    assert matches.pieces.position[0] == behind.index(C)
    assert matches[1:] == (8, 1, 0)


@pytest.mark.parametrize(("loss", "chosen"), [("nothing", 4), ("evicted", 0), ("too deep", 0)])
def test_12_a_donor_that_lacks_the_beginning_is_not_compared(loss, chosen):
    # Block 4, "ghqr", connects "stuv" with the beginning of the document.
    depths = np.array([0, 0, 3 if loss == "too deep" else 0, 0, 0])
    index = build((spell(C), {}), (spell(f"..{A}{C}.."), {"depths": depths}))
    if loss == "evicted":
        index.remove([4])
    matches = match(index, 0, spell(f"{A}z{C}"), start=9, max_depth=2)
    assert matches.num_tokens == 8
    assert matches.pieces.block[0] == chosen


@pytest.mark.parametrize(("text", "start", "stop"), [(A + ".." + C, 10, 18), (C + ".." + A, 0, 8)])
def test_12_text_of_the_prompt_outside_of_the_range_counts_too(text, start, stop):
    index = build((spell(FILLER + C), {}), (spell(A + C), {}))
    assert match(index, 0, spell(text), start, stop).pieces.block.tolist() == [6, 7]


def test_12_text_whose_hash_collides_with_the_prompts_does_not_count(monkeypatch):
    make_everything_collide(monkeypatch)
    index = build((spell(FILLER + C), {}), (spell(A + C), {}))
    assert match(index, 0, spell(f"{A}..{C}"), start=8).pieces.block.tolist() == [6, 7]


def test_12_equal_left_context_is_better_than_any_other_text_of_the_prompt():
    index = build((spell(A + B + C), {}), (spell("zzz." + C), {"depths": 1}))
    matches = match(index, 0, spell(A + B + "." + C), start=17)
    assert matches.pieces.rows() == [[17, 4, 7, 0, 4], [21, 4, 8, 0, 8]]


def test_12_then_the_lower_depth_then_the_larger_position_then_the_lower_id():
    deep = (spell("zzzzabcd"), {"depths": 2})
    early, late = (spell("abcd"), {"depths": 1}), (spell("zzzzabcd"), {"depths": 1})
    index = build(deep, early, late, late)
    for block in (4, 6, 2, 1):
        assert match(index, 0, spell(".abcd")).pieces.block.tolist() == [block]
        index.remove([block])


def test_12_where_all_in_front_is_equal_what_is_in_place_comes_first():
    """Before text that the prompt repeats, and before a lower depth."""
    index = build((spell("abcdabcd"), {}), (spell("abcdefgh"), {"depths": 2}))
    index.remove([0])
    assert match(index, 0, spell("abcd....")).pieces.block.tolist() == [2]
    index.remove([2])
    assert match(index, 0, spell("abcd....")).pieces.block.tolist() == [1]


@pytest.mark.parametrize(("between", "seen"), [(63, True), (64, False)])
def test_12_text_of_the_prompt_far_in_front_is_not_looked_for(between, seen):
    sequences = "abcd" + "zzzz" * 99 + "efgh", "abcd" + "zzzz" * between + "efgh"
    index = build(*((spell(text), {}) for text in sequences), blocks=400)
    matches = match(index, 0, spell("abcd..efgh"))
    assert matches.pieces.position[-1] == sequences[seen].index("efgh")


def test_12_the_order_of_insertion_does_not_matter():
    fronts = ["", A, FILLER, B, A + FILLER, FILLER + B, A + B, B + A, A + "..zz"]
    chosen = set()
    for seed in range(8):
        index = SegmentIndex(6 * len(fronts), 4)
        for which in np.random.default_rng(seed).permutation(len(fronts)).tolist():
            tokens = np.array(spell(fronts[which] + C), np.int32)
            first = 6 * which
            index.insert(0, np.arange(first, first + tokens.size // 4, dtype=np.int32), tokens, 0)
        index.begin_step()
        chosen.add(tuple(match(index, 0, spell(f"..{A}..{B}..{C}")).pieces.block.tolist()))
    ((*_, fourth, fifth),) = chosen
    assert [fourth, fifth] == [6 * fronts.index(A + B) + 4, 6 * fronts.index(A + B) + 5]


@pytest.mark.parametrize(("better", "chosen"), [(31, 31), (32, 0), (9000, 0)])
def test_of_10_000_copies_only_the_oldest_are_compared(better, chosen):
    copies = [(spell("zzzzefgh"), {})] * 10_000
    copies[better] = spell("abcdefgh"), {}
    index = build(*copies, blocks=20_000)
    assert match(index, 0, spell("abcd..efgh")).pieces.block[-1] == 2 * chosen + 1


@pytest.mark.parametrize(("deep", "found"), [(255, 4), (256, 0)])
def test_behind_that_many_copies_that_may_not_donate_none_is_looked_for(deep, found):
    copies = [(spell("abcd"), {"depths": 3})] * deep
    index = build(*copies, (spell("abcd"), {}), blocks=deep + 1)
    assert match(index, 0, spell("abcd"), max_depth=2).num_tokens == found


@pytest.mark.parametrize(("deep", "is_better"), [(254, True), (255, False)])
def test_copies_that_may_not_donate_hide_a_better_donor_once_they_are_many(deep, is_better):
    copies = [(spell("efgh"), {"depths": 3})] * deep
    index = build((spell("zzzzefgh"), {}), *copies, (spell("abcdefgh"), {}), blocks=deep + 4)
    matches = match(index, 0, spell("abcd..efgh"), start=6, max_depth=2)
    assert matches.pieces.block.tolist() == [deep + 3 if is_better else 1]


@pytest.mark.parametrize(("equal", "is_shorter"), [(1023, True), (1024, False)])
def test_12_left_context_is_compared_up_to_a_limit(equal, is_shorter):
    """The donor with more of it is the deeper one."""
    context, text = [*range(100, 1140)], [50, 51, 52, 53]
    short = [9] * (1028 - equal) + context[-equal:] + text
    index = build((context[-1028:] + text, {"depths": 1}), (short, {}), blocks=600)
    (block,) = match(index, 0, context + text, start=len(context)).pieces.block.tolist()
    assert block == (257 if is_shorter else 257 + len(short) // 4)


def test_12_the_first_block_of_the_pool_is_context_like_any_other():
    index = build((spell("abcdqrst"), {"depths": 1}), (spell("zzzzqrst"), {}))
    assert match(index, 0, spell("abcdqrst"), start=4).pieces.block.tolist() == [1]
    assert match(index, 0, spell("abcd..qrst"), start=6).pieces.block.tolist() == [1]
    assert match(index, 0, spell("bcd..qrst"), start=5).pieces.block.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "start", "stop"), [("efghqrst", 4, 8), ("qrstefgh", 0, 4), ("efgh.qrst", 0, 9)]
)
def test_12_text_right_beside_the_range_counts_too(text, start, stop):
    index = build((spell("efghzzzzqrst"), {"depths": 1}), (spell("yyyyzzzzqrst"), {}))
    assert 2 in match(index, 0, spell(text), start, stop).pieces.block.tolist()


@pytest.mark.parametrize(
    ("newer", "depth", "length"), [(31, 0, 7), (32, 0, 5), (255, 3, 7), (256, 3, 4)]
)
def test_of_many_children_only_the_newest_are_compared(newer, depth, length):
    """And of those that may not donate, only so many are passed over."""
    child = {"first_position": 4, "parent_block": 0}
    others = [(spell("ezzz"), child | {"depths": depth})] * newer
    index = build((spell("abcd"), {}), (spell("efgh"), child), *others, blocks=newer + 2)
    assert match(index, 0, spell("abcdefg."), max_depth=2).num_tokens == length


def test_the_child_that_equals_longest_ends_the_run():
    index = build(
        (spell("abcd"), {}),
        *((spell(t), {"first_position": 4, "parent_block": 0}) for t in ("ezzz", "efgz", "efzz")),
    )
    matches = match(index, 0, spell("abcdefgh"))
    assert matches.pieces.rows() == [[0, 4, 0, 0, 0], [4, 3, 2, 0, 4]]


@pytest.mark.parametrize("text", ["abcdefgh", "abcdefg."])
def test_12_among_equal_children_the_lower_depth_then_the_lower_id(text):
    child = {"first_position": 4, "parent_block": 0}
    index = build(
        (spell("abcd"), {}), *((spell("efgh"), {**child, "depths": depth}) for depth in (2, 1, 1))
    )
    for block in (2, 3, 1):
        assert match(index, 0, spell(text)).pieces.block.tolist() == [0, block]
        index.remove([block])


def test_left_context_is_compared_through_evictions_only_as_far_as_links_go():
    index = build((spell("abcdefghijkl"), {}), (spell("zzzhijkl"), {}))
    index.remove([1])  # the first sequence loses its middle: its "ijkl" has no context left
    assert match(index, 0, spell("efghijkl"), start=4).pieces.block[0] == 4


@pytest.mark.parametrize("options", [{"namespace": 1}, {"depths": 3}])
def test_other_namespaces_and_deeper_blocks_are_misses(options):
    index = build((spell("abcd"), options))
    assert match(index, 0, spell("abcd"), max_depth=2).num_tokens == 0


def test_22_a_fresh_block_is_a_miss_until_the_next_step():
    index = SegmentIndex(4, 4)
    index.insert(0, np.array([2], np.int32), np.array(spell("abcd"), np.int32), 0)
    assert match(index, 0, spell("abcd")).num_tokens == 0
    index.begin_step()
    assert match(index, 0, spell("abcd")).num_tokens == 4


def test_a_block_of_another_namespace_is_a_donor_in_mine_with_links_of_its_own():
    index = build((spell("abcdefghijkl"), {"namespace": 5}), size=4)
    index.insert(0, np.array([0, 1], np.int32), np.array(spell("abcdefgh"), np.int32), 0)
    prompt = spell("..cdefghijkl")
    assert match(index, 5, prompt).pieces.rows() == [
        [2, 2, 0, 2, 2],
        [4, 4, 1, 0, 4],
        [8, 4, 2, 0, 8],
    ]
    assert match(index, 0, prompt).pieces.rows() == [[2, 2, 0, 2, 2], [4, 4, 1, 0, 4]]
    assert match(index, 1, prompt).num_tokens == 0
    index.remove([1])
    assert match(index, 0, prompt).num_tokens == 0
    assert match(index, 5, prompt).pieces.rows() == [[8, 4, 2, 0, 8]]


def test_deep_copies_in_front_do_not_hide_a_donor():
    index = build((spell("abcd") * 100, {"depths": 3}), (spell("abcd"), {}), blocks=101)
    assert match(index, 0, spell("abcd"), max_depth=2).pieces.block[0] == 100


def test_a_passage_cached_often_is_still_found():
    index = build((spell("abcd") * 1000, {}), blocks=1000)
    assert match(index, 0, spell("abcd")).num_tokens == 4


def test_a_prompt_of_one_token_repeated_ends_quickly():
    index = build(([7] * 32 * 2000, {}), size=32, blocks=2000)
    matches = match(index, 0, [7] * 16_384)
    assert matches.num_tokens == 16_384
    assert len(matches.pieces) <= 2 * 16_384 // 32


def spent(index: SegmentIndex, prompt: Sequence[int], max_depth: int = 9) -> tuple[int, int]:
    """What choices take of `MAX_WORK`, and the tokens that are found."""
    tokens = np.array(prompt, np.int32)
    hashes, salt, stop = matcher_hashes(tokens, index.block_size), matcher.salt_of(0), len(prompt)
    groups = matcher.indexed_windows(index, 0, tokens, hashes, 0, stop)
    work = np.full(1, assembly.MAX_WORK, np.int64)
    arrays = index.nodes, index.tokens, groups, tokens, hashes, salt
    table, _, _ = matcher.assemble(*arrays, 0, stop, index.step, max_depth, work)
    return assembly.MAX_WORK - int(work[0]), int(table[:, assembly.LENGTH].sum())


@pytest.mark.parametrize("period", [1, 3])
def test_a_content_without_donors_is_gone_through_once(period):
    index = SegmentIndex(900, 4)
    texts = [[7 + (i + j) % period for j in range(4)] for i in range(period)]
    for block in range(300 * period):
        index.insert(0, np.array([block], np.int32), np.array(texts[block % period], np.int32), 0)
    prompt = [7 + i % period for i in range(4096)]
    assert spent(index, prompt) == (period * assembly.MAX_VISITED, 0)


def test_contents_remembered_in_one_place_are_told_apart():
    index = SegmentIndex(assembly.MAX_KNOWN + 1, 4)
    for block, text, depth in ((0, "abcd", 3), (assembly.MAX_KNOWN, "efgh", 0)):
        tokens = np.array(spell(text), np.int32)
        index.insert(0, np.array([block], np.int32), tokens, 0, depths=depth)
    index.begin_step()
    matches = match(index, 0, spell("abcdefgh"), max_depth=2)
    assert matches.pieces.rows() == [[4, 4, assembly.MAX_KNOWN, 0, 0]]


def test_all_that_a_choice_looks_at_is_counted():
    """Two copies, with two blocks in front that are too deep, and stand for context only."""
    deep = np.array([3, 3, 0], np.int8)
    copies = [(spell("stuvwxyzabcd"), {"depths": deep})] * 2
    of_groups = 2 + 1  # the copies of `wxyz`, none of which may donate, and the first of `abcd`
    candidates = 2
    of_contexts = candidates * (1 + len("tuvwxyz") // 4)
    of_ancestors = candidates * 2
    taken = of_groups + candidates + of_contexts + of_ancestors + candidates
    assert spent(build(*copies), spell("tuvwxyzabcd"), max_depth=2) == (taken, 4)


def test_where_there_is_nothing_to_choose_nothing_is_compared():
    assert spent(build((spell("abcd"), {})), spell("abcd")) == (1 + 1, 4)
    index = build((spell("zzzzefgh"), {}), (spell("abcdefgh"), {}))
    of_contexts = 2 * (1 + len("bcd") // 4)
    assert spent(index, spell("bcdefgh")) == (1 + 2 + of_contexts, 7)


def test_the_work_of_all_choices_of_a_prompt_is_bounded():
    """Runs of one block each, whose donors have the same blocks in front as often as can be."""
    copies = [(spell("abcd") * (assembly.MAX_ANCESTORS + 1), {})] * assembly.MAX_CANDIDATES
    index = build(*copies, blocks=len(copies) * (assembly.MAX_ANCESTORS + 1))
    prompt = spell("abcd.") * 2000
    each = spent(index, prompt[:5])[0] - 1  # and once a look at the first donor
    assert spent(index, prompt) == (1 + -(-(2**18) // each) * each, 2000 * 4)


def test_where_no_work_is_left_the_oldest_donor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    index = build((spell("zzzzefgh"), {"depths": 1}), (spell("abcdefgh"), {}))
    prompt = spell("abcd..efgh")
    assert match(index, 0, prompt).pieces.block.tolist() == [2, 3]
    monkeypatch.setattr(matcher, "MAX_WORK", 0)
    assert match(index, 0, prompt).pieces.block.tolist() == [2, 1]
    assert match(index, 0, prompt, max_depth=0).pieces.block.tolist() == [2, 3]


@pytest.mark.parametrize(("work", "chosen"), [(1, 1), (2, 3)])
def test_a_donor_is_chosen_as_long_as_any_work_is_left(
    work: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at the first one takes one."""
    index = build((spell("zzzzefgh"), {}), (spell("abcdefgh"), {}))
    monkeypatch.setattr(matcher, "MAX_WORK", work)
    assert match(index, 0, spell("abcd..efgh"), start=6).pieces.block.tolist() == [chosen]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_11_a_prompt_shorter_than_a_block_matches_nothing(length):
    index = build((spell("abcd"), {}))
    assert match(index, 0, spell("abcd")[:length])[1:] == (0, 0, 0)


def test_an_empty_range_and_an_empty_index_match_nothing():
    index = build((spell("abcd"), {}))
    assert match(index, 0, spell("abcd"), start=2, stop=2).pieces.rows() == []
    index.clear()
    assert match(index, 0, spell("abcd")).pieces.rows() == []


def test_bad_arguments_are_named():
    index = build((spell("abcd"), {}))
    tokens = np.arange(8, dtype=np.int32)
    with pytest.raises(ValueError, match="4 hashes for 8 tokens and blocks of 4"):
        find_matches(index, 0, tokens, window_hashes(tokens, 5), 0, 8, 0)
    with pytest.raises(ValueError, match=r"\[3, 9\) is not a range of a prompt of 8 tokens"):
        find_matches(index, 0, tokens, window_hashes(tokens, 4), 3, 9, 0)


def test_warm_up_compiles_what_requests_use():
    warm_up()
    kernels = (
        matcher.find_groups,
        matcher.assemble,
        index_module.insert_blocks,
        index_module.remove_blocks,
    )
    compiled = [len(kernel.signatures) for kernel in kernels]
    index = build((spell("abcdefgh"), {"depths": 1, "parent_block": 3}))
    prompt = np.array(spell("abcdefgh"), np.int32)
    prompt.setflags(write=False)
    hashes = window_hashes(prompt, 4)
    find_matches(index, np.int64(0), prompt, hashes, np.int32(0), np.int64(8), 4)
    index.remove([np.int32(1)])
    assert [len(kernel.signatures) for kernel in kernels] == compiled
