# SPDX-License-Identifier: Apache-2.0
"""What was measured, line by line in a file: a run that stopped goes on where it was.

The first line says what was asked (`Setting`), every further one is one example under one kind of
donors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import records
from bench.records import RecordsError

DIGITS = 6
_SAMPLE = 1 << 20
"""Bytes of the beginning and of the end of a file by which weights are told apart."""


@dataclass(frozen=True)
class Outcome:
    """What came of one example under one arm; the fields with defaults, of arms that reuse.

    Attributes:
        score: of the answer, 0 to 1.
        said: the answer; None where it is that of full prefill.
        ttft_ms: time to the first token.
        tokens: of the full answer along which distributions were compared.
        first_kl: divergence of the first token's distribution from that of full prefill, in nats.
        answer_kl: mean divergence along the full answer, whose tokens are forced.
        agreement: share of the full answer's tokens that would have been chosen there.
        work: share of (token, layer) pairs that were computed, as the report says.
        reused: tokens reused, as a share of the documents'.
        policy: as the report says.
        drift: as the report says, if it does.
    """

    score: float
    said: str | None
    ttft_ms: float
    tokens: int
    first_kl: float = 0.0
    answer_kl: float = 0.0
    agreement: float = 1.0
    work: float = 1.0
    reused: float = 0.0
    policy: str | None = None
    drift: float | None = None


@dataclass(frozen=True)
class Record:
    """One example under one kind of donors.

    Attributes:
        task, kind, number: of the example.
        donors: how the documents were computed before.
        documents: their number.
        prompt_tokens: length of the prompt.
        commit: of the code.
        full: outcome of full prefill.
        arms: outcomes by arm.
    """

    task: str
    kind: str
    number: int
    donors: str
    documents: int
    prompt_tokens: int
    commit: str | None
    full: Outcome
    arms: Mapping[str, Outcome]

    @property
    def key(self) -> tuple[str, int, str]:
        """What there is one record of."""
        return self.task, self.number, self.donors


@dataclass(frozen=True)
class Setting:
    """What must be equal for two records to belong together.

    Attributes:
        model: name of its folder.
        model_digest: see `model_digest`.
        seeds: name of the set of seeds.
        seed: of that set, which has another one once a policy was changed (`quality.seeds`).
        text: digest of the paragraphs that documents are made of.
        kv_cache_dtype: vLLM's option.
        least_documents: of the prompts, which have so many.
    """

    model: str
    model_digest: str
    seeds: str
    seed: str
    text: str
    kv_cache_dtype: str = "auto"
    least_documents: int = 1

    def entry(self) -> dict[str, str | int]:
        """What a reader is told: what is as usual is omitted, as in files older than it."""
        return {name: value for name, value in asdict(self).items() if value != _USUAL.get(name)}


_USUAL = {"kv_cache_dtype": "auto", "least_documents": 1}


class Records:
    """Records of one run, in memory and, with a file, on disk.

    Arms of an example that were measured at different times are records of their own, each with its
    commit; whoever iterates is given one record of all arms.

    Attributes:
        setting: of all of them.
        dropped: outcomes that were dropped since full prefill now answers otherwise (`add`).
    """

    def __init__(self, setting: Setting, file: Path | None = None) -> None:
        self.setting = setting
        self.dropped = 0
        self._file = file
        self._by_key: dict[tuple[str, int, str], list[Record]] = {}

    @classmethod
    def open(
        cls, file: Path | None, setting: Setting, commit: str | None, any_commit: bool = False
    ) -> Records:
        """Records of a file, which is begun where there is none.

        Args:
            file: where they are; None: nowhere.
            setting: of this run.
            commit: of the code that runs.
            any_commit: whether records of other code are gone on with.

        Raises:
            RecordsError: the file is of another setting or other code, or holds something else.
        """
        kept = cls(setting, file)
        if file is None:
            return kept
        kept._take(file, records.opened(file, "english", asdict(setting), _USUAL))
        records.require_commit(file, kept.commits, commit, any_commit)
        return kept

    @classmethod
    def joined(cls, files: Sequence[Path]) -> Records:
        """Records of several files together, whatever their commits; nothing is written.

        Raises:
            RecordsError: a file is of another setting than the first, or holds something else; or
                full prefill answered an example differently in another file.
        """
        kept = None
        for file in files:
            asked, entries = records.read(file, "english")
            try:
                setting = Setting(**{**_USUAL, **asked})
            except TypeError:
                raise records.not_of_this_version(file, -1) from None
            kept = kept or cls(setting)
            if setting != kept.setting:
                raise RecordsError(
                    f"{file} was measured with {setting.entry()}, {files[0]} with "
                    f"{kept.setting.entry()}: only records of equal settings can be joined"
                )
            kept._take(file, entries, joining=True)
        if kept is None or not len(kept):
            raise RecordsError("no records to join")
        return kept

    @property
    def commits(self) -> set[str | None]:
        """Those that they were measured at."""
        return {part.commit for parts in self._by_key.values() for part in parts}

    def write(self, file: Path) -> None:
        """All of them as a file of their own, in place of what is there."""
        parts = (part for parts in self._by_key.values() for part in parts)
        records.write(file, "english", asdict(self.setting), map(asdict, parts), _USUAL)

    def __iter__(self) -> Iterator[Record]:
        return map(_of_all_arms, self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def missing(
        self, key: tuple[str, int, str], arms: Iterable[str], full: Outcome | None = None
    ) -> list[str]:
        """Which of these arms were not measured for an example under a kind of donors.

        Args:
            full: what full prefill answers now: what was measured beside another answer is missing.
        """
        parts = self._by_key.get(key, ())
        alike = [part for part in parts if full is None or _same_answer(part.full, full)]
        found = {arm for part in alike for arm in part.arms}
        return [arm for arm in arms if arm not in found]

    def add(self, record: Record) -> None:
        """Keep a record; one of the same example is kept beside it, arm by arm.

        Where full prefill answers otherwise than then, what was measured beside that answer is
        dropped, and missing.
        """
        self.dropped += self._keep(record)
        if self._file:
            records.append(self._file, asdict(record))

    def _keep(self, record: Record) -> int:
        """Returns how many outcomes it takes the place of that are of another answer."""
        known = self._by_key.get(record.key, [])
        alike = [part for part in known if _same_answer(part.full, record.full)]
        others = (_without(part, record.arms) for part in alike)
        self._by_key[record.key] = [*(part for part in others if part.arms), record]
        return sum(len(part.arms) for part in known if part not in alike)

    def _take(self, file: Path, entries: Iterable[Any], joining: bool = False) -> None:
        for record in records.each(file, entries, _record):
            known = self._by_key.get(record.key, [])
            if joining and not all(_same_answer(part.full, record.full) for part in known):
                task, example, donors = record.key
                raise RecordsError(
                    f"{file}: full prefill answered {task} {example} ({donors}) otherwise than in "
                    "another file: arms that were measured beside different answers are not joined"
                )
            self._keep(record)


def _record(entry: Mapping[str, Any]) -> Record:
    """From a line of a file."""
    arms = {name: Outcome(**one) for name, one in entry["arms"].items()}
    return Record(**{**entry, "full": Outcome(**entry["full"]), "arms": arms})


def _same_answer(one: Outcome, other: Outcome) -> bool:
    return (one.score, one.said) == (other.score, other.said)


def _without(record: Record, arms: Iterable[str]) -> Record:
    """A record without some arms, which were measured anew."""
    kept = {name: outcome for name, outcome in record.arms.items() if name not in arms}
    return replace(record, arms=kept)


def _of_all_arms(parts: Sequence[Record]) -> Record:
    """One record of an example; its commit is that of the last."""
    arms = {name: outcome for part in parts for name, outcome in part.arms.items()}
    return replace(parts[-1], arms=arms)


def model_digest(folder: Path) -> str:
    """Of the configuration and of the ends of all weights: other weights have another one."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weights(folder):
        with file.open("rb") as data:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            digest.update(data.read(_SAMPLE))
            data.seek(max(0, size - _SAMPLE))
            digest.update(data.read())
    return digest.hexdigest()[:12]


def weights(folder: Path) -> Sequence[Path]:
    """Files of weights in a folder of Hugging Face."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def rounded(value: float) -> float:
    """As records keep it."""
    return round(float(value), DIGITS)
