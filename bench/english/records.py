# SPDX-License-Identifier: Apache-2.0
"""What was measured, line by line in a file: a run that stopped goes on where it was.

The first line says what was asked (`Setting`), every further one is one example under one kind of
donors. Lines are appended as they are measured; one that was torn by the end of a process is cut
off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DIGITS = 6
_SAMPLE = 1 << 20
"""Bytes of the beginning and of the end of a file by which weights are told apart."""


class RecordsError(ValueError):
    """A file of records does not belong to this run; the text is one sentence."""


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
        text: digest of the paragraphs that documents are made of.
        kv_cache_dtype: vLLM's option.
    """

    model: str
    model_digest: str
    seeds: str
    text: str
    kv_cache_dtype: str = "auto"

    def entry(self) -> dict[str, str]:
        """Its line in a file: what is as usual is omitted, as in files that are older than it."""
        return {name: value for name, value in asdict(self).items() if value != _USUAL.get(name)}


_USUAL = {"kv_cache_dtype": "auto"}


class Records:
    """Records of one run, in memory and, with a file, on disk."""

    def __init__(self, setting: Setting, file: Path | None = None) -> None:
        self.setting = setting
        self._file = file
        self._by_key: dict[tuple[str, int, str], Record] = {}

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
        records = cls(setting, file)
        if file is None:
            return records
        if not file.exists() or not file.stat().st_size:
            file.parent.mkdir(parents=True, exist_ok=True)
            records._write({"english": setting.entry()})
            return records
        whole = file.read_bytes().rpartition(b"\n")[0]
        for number, line in enumerate(whole.splitlines()):
            records._take(file, number, _entry(line))
        if not whole:
            raise RecordsError(f"{file} is no file of `bench english`: choose another name")
        os.truncate(file, len(whole) + 1)  # what was torn is measured again
        others = {one.commit for one in records} - {commit}
        if others and not any_commit:
            raise RecordsError(
                f"{file} was measured at commit {', '.join(sorted(map(str, others)))}, this is "
                f"{commit}: go on with --resume, or remove the file"
            )
        return records

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def missing(self, key: tuple[str, int, str], arms: Iterable[str]) -> list[str]:
        """Which of these arms were not measured for an example under a kind of donors."""
        found = self._by_key.get(key)
        return [arm for arm in arms if found is None or arm not in found.arms]

    def add(self, record: Record) -> None:
        """Keep a record; one of the same example is kept beside it, arm by arm."""
        self._keep(record)
        if self._file:
            self._write(asdict(record))

    def _keep(self, record: Record) -> None:
        known = self._by_key.get(record.key)
        arms = {**known.arms, **record.arms} if known else record.arms
        self._by_key[record.key] = Record(**{**vars(record), "arms": arms})

    def _take(self, file: Path, number: int, entry: Any) -> None:
        if number == 0:
            other = entry.get("english") if isinstance(entry, dict) else None
            if not isinstance(other, dict):
                raise RecordsError(f"{file} is no file of `bench english`: choose another name")
            for name, value in asdict(self.setting).items():
                found = other.get(name, _USUAL.get(name))
                if found != value:
                    raise RecordsError(
                        f"{file} was measured with {name} {found}, not {value}: choose "
                        "another file, or remove this one"
                    )
            return
        try:
            arms = {name: Outcome(**one) for name, one in entry["arms"].items()}
            self._keep(Record(**{**entry, "full": Outcome(**entry["full"]), "arms": arms}))
        except (AttributeError, KeyError, TypeError):
            raise RecordsError(
                f"{file}: line {number + 1} is no record of this version: choose another file"
            ) from None

    def _write(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")


def records_file(json_file: Path) -> Path:
    """Where the records of a result are: beside it."""
    return json_file.with_suffix(".jsonl")


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


def _entry(line: bytes) -> Any:
    """What a line holds; None if it is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None
