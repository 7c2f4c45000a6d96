# SPDX-License-Identifier: Apache-2.0
"""Examples asked of models that were trained on documents computed alone, through the engine.

`Reference` is the same model in plain torch, with the mask written out: what is served must have
its log-probabilities.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench import engine, harness
from bench.quality import language
from bench.quality.engine import KV_SPACE_GIB, MAX_TOKENS, MODEL, generate, require_model
from bench.quality.tasks import Example
from segreuse_extras.trained.layout import Layout, Names
from vllm_segreuse.model.documents import KEY

UNTRAINED = {
    "isolated_documents": True,
    "link_tokens": 0,
    "max_documents": 8,
    "document_start": "<doc>",
    "document_end": "<eos>",
    "link_token": "<|link_{document}_{index}|>",
}
"""The lab's model as if it had been trained so. Its documents begin with `<doc>` anyway."""


A = TypeVar("A")


class Asked(NamedTuple):
    """What came of one example.

    Attributes:
        score: see `Example.score`.
        work: share of (token, layer) pairs that were computed, documents being known.
        ttft_ms: time to the first token; None: it was not asked by itself.
    """

    score: float
    work: float
    ttft_ms: float | None


def untrained(folder: Path) -> Path:
    """A copy of the lab's model that says it was trained on documents computed alone."""
    require_model()
    copy = folder / "untrained"
    shutil.copytree(MODEL, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {KEY: UNTRAINED}))
    return copy


def layout_of(model: Path) -> Layout:
    """The layout that a model's folder says.

    Raises:
        BenchError: it says none.
    """
    from transformers import AutoTokenizer

    names = Names.of_config(json.loads((model / "config.json").read_text()).get(KEY))
    if names is None:
        raise harness.BenchError(f"{model} was not trained on documents computed alone")
    return names.layout(AutoTokenizer.from_pretrained(model).get_vocab().get)


def prompt_of(
    layout: Layout, head: Sequence[int], documents: Sequence[Sequence[int]], tail: Sequence[int]
) -> list[int]:
    """A prompt as the model was trained on: documents between start and end, links behind each."""
    tokens = list(head)
    for number, document in enumerate(documents):
        inside = document[1:] if document[0] == layout.start else document
        tokens += [layout.start, *inside, layout.end, *layout.links[number]]
    return [*tokens, *tail]


def generate_all(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    words: Sequence[int],
    extra_args: Sequence[Mapping[str, Any] | None],
    timed: bool = False,
) -> list[tuple[Any, float | None]]:
    """The output of each prompt, and the milliseconds until its first token if it is `timed`.

    What is timed runs by itself, all else side by side: a prompt of the lab is so short that most
    of its time is vLLM's for the step.
    """
    from vllm import SamplingParams

    if timed:
        each = zip(prompts, words, extra_args, strict=True)
        return [generate(llm, list(one), count, given, logprobs=0) for one, count, given in each]
    sampling = [
        SamplingParams(
            max_tokens=count,
            temperature=0.0,
            logprobs=0,
            extra_args=dict(given) if given else None,
            ignore_eos=True,
        )
        for count, given in zip(words, extra_args, strict=True)
    ]
    tokens = [{"prompt_token_ids": list(one)} for one in prompts]
    return [(output, None) for output in llm.generate(tokens, sampling, use_tqdm=False)]


def outcome(example: Example, output: Any, ttft_ms: float | None, work: float) -> Asked:
    """What came of an example."""
    [answer] = output.outputs
    return Asked(example.score(language.decode(answer.token_ids)), work, ttft_ms)


@contextmanager
def isolated_engine(
    model: Path, asker: Callable[[Any, Layout], A], **arguments: Any
) -> Iterator[A]:
    """A model with documents computed alone, served.

    Args:
        asker: asks it; `Isolated` as a rule.
    """
    if not (model / "model.safetensors").is_file():
        raise harness.BenchError(f"no model at {model}: train one, see docs/trained-models.md")
    engine.prepare_environment(KV_SPACE_GIB)
    with engine.engine(
        model,
        segreuse=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        max_logprobs=-1,
        enforce_eager=True,
        **arguments,
    ) as llm:
        yield asker(llm, layout_of(model))


class Isolated:
    """Asks examples; every example has a namespace of its own."""

    def __init__(self, llm: Any, layout: Layout) -> None:
        self.llm = llm
        self.layout = layout
        self._asked = 0

    def ask(self, examples: Sequence[Example], timed: bool = False) -> list[Asked]:
        """The answers, the documents having been computed for other prompts before.

        Args:
            timed: one after the other, with the time to the first token; else side by side.

        Raises:
            BenchError: documents were not reused as they should have been.
        """
        prompts, given = zip(*self.prepared(examples), strict=True)
        words = [len(example.answer) for example in examples]
        answers = generate_all(self.llm, prompts, words, given, timed)
        found = []
        for example, prompt, (output, ms) in zip(examples, prompts, answers, strict=True):
            share = self._require_exact(output)["computed_share"]
            found.append(outcome(example, output, ms, share * self.share_of(example, prompt)))
        return found

    def prepared(self, examples: Sequence[Example]) -> list[tuple[list[int], Mapping[str, Any]]]:
        """Prompt of each example and what its request says, once its documents are computed."""
        names = [f"example {self._asked + number}" for number in range(len(examples))]
        self._asked += len(examples)
        keys = [{"extra_keys": [name]} for name in names]
        others = []
        for example in examples:
            documents = [language.encode(document) for document in example.documents]
            tail = language.encode(example.suffix[-1:])
            others.append(prompt_of(self.layout, [], documents[::-1], tail))
        generate_all(self.llm, others, [1] * len(others), keys)
        return [(self.prompt(one), key) for one, key in zip(examples, keys, strict=True)]

    def share_of(self, example: Example, prompt: Sequence[int]) -> float:
        """Length of a prompt, as a share of that with whole documents."""
        return 1.0

    def prompt(
        self, example: Example, documents: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """The example's prompt, without new text between documents.

        Args:
            documents: what stands for each; None: its text.
        """
        if documents is None:
            documents = [language.encode(document) for document in example.documents]
        head, tail = language.encode(example.prefix), language.encode(example.suffix)
        return prompt_of(self.layout, head, documents, tail)

    def difference(self, example: Example, reference: Reference, words: int = 32) -> float:
        """How far log-probabilities of `words` served words are from the reference's, at most."""
        [(prompt, given)] = self.prepared([example])
        [(output, _)] = generate_all(self.llm, [prompt], [words], [given])
        self._require_exact(output)
        [answer] = output.outputs
        tokens = list(answer.token_ids)
        wanted = self.wanted(example, prompt, tokens, reference)
        found = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
        return max(abs(a - b) for a, b in zip(found, wanted, strict=True))

    def wanted(
        self, example: Example, prompt: Sequence[int], answer: Sequence[int], reference: Reference
    ) -> list[float]:
        """Log-probabilities of an answer by the reference."""
        return reference.logprobs(prompt, answer)

    def _require_exact(self, output: Any) -> dict[str, Any]:
        report = (output.kv_transfer_params or {}).get("segreuse")
        spans = self.layout.spans(output.prompt_token_ids)
        wanted = sum(stop - start for start, stop in spans)
        told = {} if report is None else dict(report)
        reused = told.get("reused_tokens", 0) + told.get("prefix_tokens", 0)
        if told.get("policy") != "link" or reused < wanted:
            raise harness.BenchError(
                f"{wanted} tokens of documents were to be reused exactly, and the report is {told}"
            )
        return told


class Reference:
    """The model in plain torch: each document sees itself only."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._layout = layout_of(model)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Of each token of the answer."""
        import torch

        tokens = torch.tensor([[*prompt, *answer]])
        sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for start, stop in self._layout.spans(prompt):
            sees[start:stop, :start] = False
        mask = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = self._model(tokens, attention_mask=mask[None, None]).logits[0]
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        values: list[float] = found[torch.arange(len(answer)), torch.tensor(answer)].tolist()
        return values
