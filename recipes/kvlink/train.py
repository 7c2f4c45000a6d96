# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes.kvlink.train MODEL OUT --qa FILE ...`: train a model on documents apart.

MODEL is a folder or a name that transformers loads, a causal model with RoPE. Each kind of data is
a file of JSON lines (docs/trained-models.md); the shares of kinds are those of KVLink. OUT is a
folder that `vllm-segreuse serve` takes. A training that was stopped goes on where its last
checkpoint was written, and ends with the same weights as one that was not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipes.kvlink import attention, folder, plot
from recipes.kvlink.batch import Collator, Rows
from recipes.kvlink.examples import SHARES, DataError, Mixture, read
from recipes.kvlink.optimizer import MuonAndAdamW
from recipes.kvlink.rows import UNLEARNT, Writer
from segreuse_extras.trained.layout import LayoutError, Names

LAYOUT = {"link_tokens": 5, "max_documents": 10, "chunk_tokens": 100, "anchor_tokens": 0}
"""What options that are not given stand for, where the model's folder has no layout yet."""


def trainer_class(matrix_rate: float) -> type:
    """transformers' Trainer, which also logs the share of right tokens.

    Args:
        matrix_rate: of Muon; 0: there is AdamW only.
    """
    from transformers import Trainer

    class LinkTrainer(Trainer):
        right, asked = 0, 0

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, **rest)
            wanted = inputs["labels"][:, 1:]
            said = outputs.logits[:, :-1].argmax(-1)
            self.asked += int((wanted != UNLEARNT).sum())
            self.right += int((said == wanted).sum())
            return (loss, outputs) if return_outputs else loss

        def create_optimizer(self, model: Any = None) -> Any:
            if matrix_rate and getattr(self, "optimizer", None) is None:
                given = self.args
                betas = (given.adam_beta1, given.adam_beta2)
                rates = (matrix_rate, given.learning_rate, betas, given.weight_decay)
                self.optimizer = MuonAndAdamW(model or self.model, *rates)
            return super().create_optimizer(model)

        def log(self, logs: dict[str, float], *rest: Any, **options: Any) -> None:
            if "loss" in logs and self.asked:
                logs["accuracy"] = self.right / self.asked
                self.right, self.asked = 0, 0
            super().log(logs, *rest, **options)

    return LinkTrainer


def train(given: argparse.Namespace) -> None:
    """Train, and write the folder.

    Raises:
        DataError, folder.ModelError, LayoutError: model, data and options do not fit.
    """
    _require_packages(given)
    from transformers import AutoConfig, set_seed

    data = {kind: read(file, kind) for kind, file in _files(given).items()}
    mixture = Mixture(data, given.shares, given.seed)
    set_seed(given.seed)  # of the new embeddings
    on_gpu = torch.cuda.is_available() and not given.cpu
    model, tokenizer, writer = _load(given, on_gpu)
    for examples in data.values():
        for example in examples[: given.checked]:
            writer.row(example)
    if given.lora:
        model = _with_lora(model, given.lora)
    settings = _settings(given, on_gpu)
    checkpoint = _last_checkpoint(given.out / "checkpoints")
    per_step = given.batch * given.accumulate * settings.world_size
    trainer = trainer_class(given.muon)(
        model=model,
        args=settings,
        train_dataset=Rows(
            *(mixture, writer, _steps_of(checkpoint) * per_step, given.steps * per_step),
            step=per_step,
        ),
        data_collator=Collator(
            model, tokenizer.pad_token_id or 0, writer.anchors is not None, on_gpu
        ),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    if given.lora:
        model = model.merge_and_unload()
        model.tie_weights()
    dtype = AutoConfig.from_pretrained(given.model).dtype
    (model if dtype is None else model.to(dtype)).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    _write_curve(trainer.state.log_history, given.out)


def _load(given: argparse.Namespace, on_gpu: bool) -> tuple[Any, Any, Writer]:
    """Model and tokenizer with the tokens of the layout, and what lays rows out for them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    names = wanted_names(given, model)
    folder.require_rotary(model)
    folder.add_tokens(model, tokenizer, names)
    tokenizer.chat_template = folder.template_of(tokenizer, names, given.chat_template)
    writer = folder.writer(tokenizer, names, given.max_tokens)
    attention.register("flex_attention" if on_gpu else "sdpa")
    model.set_attn_implementation(attention.NAME)
    return model, tokenizer, writer


def _settings(given: argparse.Namespace, on_gpu: bool) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(given.out / "checkpoints"),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=given.rate,
        warmup_steps=given.warm_up,
        lr_scheduler_type="cosine",
        weight_decay=given.weight_decay,
        adam_beta2=0.98,
        logging_steps=given.log_every,
        save_steps=given.save_every,
        save_total_limit=2,
        seed=given.seed,
        bf16=on_gpu or given.bf16,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",
        ignore_data_skip=True,  # `Rows` begins where the checkpoint ends
        remove_unused_columns=False,
        report_to=[],
        dataloader_pin_memory=False,
    )


def _require_packages(given: argparse.Namespace) -> None:
    for package in ("accelerate", *(["peft"] if given.lora else [])):
        if importlib.util.find_spec(package) is None:
            raise folder.ModelError(
                f"{package} is not installed: pip install --no-deps -r requirements/kvlink.txt"
            )


def _files(given: argparse.Namespace) -> dict[str, Path]:
    named = {kind: getattr(given, kind.replace("-", "_")) for kind in SHARES}
    files = {kind: file for kind, file in named.items() if file is not None}
    if not files:
        raise DataError(f"no data: name a file with one of --{', --'.join(SHARES)}")
    return files


def wanted_names(given: argparse.Namespace, model: Any) -> Names:
    """The layout that the options ask for, of a folder that has one: the same, but for anchors.

    Raises:
        folder.ModelError: they ask for another layout than that of the folder, or for chunks only.
        LayoutError: a number is out of range.
    """
    said = folder.known(model.config)
    has = LAYOUT if said is None else {**LAYOUT, **_numbers(said)}
    asked = {name: getattr(given, name) for name in LAYOUT}
    wanted = {name: has[name] if value is None else value for name, value in asked.items()}
    if asked["chunk_tokens"] is not None and not wanted["anchor_tokens"]:
        raise folder.ModelError("--chunk-tokens is about anchors: give --anchor-tokens, too")
    made = folder.names_for(**wanted)
    if said is None:
        return made
    for name in LAYOUT:
        may_change = made.anchors is not None and name in ("chunk_tokens", "anchor_tokens")
        if wanted[name] != has[name] and not may_change:
            raise folder.ModelError(
                f"--{name.replace('_', '-')} {wanted[name]} does not fit {given.model}, which has "
                f"{has[name]}: leave the option out, or train an ordinary model"
            )
    if made.anchors is None or said.anchors is None:
        return replace(said, anchors=made.anchors)
    return replace(said, anchors=made.anchors._replace(anchor_token=said.anchors.anchor_token))


def _numbers(names: Names) -> dict[str, int]:
    """What a folder's layout says of `LAYOUT`."""
    numbers = {"link_tokens": names.link_tokens, "max_documents": names.max_documents}
    if names.anchors is not None:
        numbers["chunk_tokens"] = names.anchors.chunk_tokens
        numbers["anchor_tokens"] = names.anchors.anchor_tokens
    return numbers


def _with_lora(model: Any, rank: int) -> Any:
    """Low-rank updates of all linear layers; embeddings, which have new rows, are trained whole."""
    from peft import LoraConfig, get_peft_model

    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            modules_to_save=["embed_tokens", *([] if is_tied else ["lm_head"])],
            ensure_weight_tying=is_tied,
            task_type="CAUSAL_LM",
        ),
    )


def _last_checkpoint(checkpoints: Path) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


def _steps_of(checkpoint: str | None) -> int:
    if checkpoint is None:
        return 0
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
    return int(state["global_step"])


def _write_curve(history: Sequence[dict[str, Any]], out: Path) -> None:
    kept = ("step", "loss", "accuracy", "learning_rate")
    entries = [{k: one[k] for k in kept if k in one} for one in history if "loss" in one]
    (out / "curve.jsonl").write_text("".join(json.dumps(one) + "\n" for one in entries))
    plot.write(out)


def _shares(text: str) -> dict[str, float]:
    shares = {}
    for part in text.split(","):
        kind, _, share = part.partition("=")
        if kind not in SHARES:
            raise argparse.ArgumentTypeError(f"no kind {kind!r}: there are {', '.join(SHARES)}")
        shares[kind] = float(share)
    return shares


def parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", help="folder or name of a causal model with RoPE")
    add("out", type=Path, help="folder that serves; a training there that was stopped goes on")
    for kind in SHARES:
        add(f"--{kind}", type=Path, metavar="FILE", help=f"JSON lines of kind {kind}")
    add("--shares", type=_shares, default=SHARES, help="such as qa=0.8,plain-qa=0.2")
    add("--link-tokens", type=int, help="behind each document (5); 0: Block-Attention")
    add("--max-documents", type=int, help="of a prompt (10)")
    add("--anchor-tokens", type=int, help="of a chunk (0: documents stay whole)")
    add("--chunk-tokens", type=int, help="of documents with anchors (100)")
    add("--chat-template", type=Path, help="default: documents, then the model's own template")
    add("--lora", type=int, default=0, metavar="RANK", help="0: all weights are trained")
    add("--steps", type=int, default=6000)
    add("--batch", type=int, default=8, help="rows of a step on one device")
    add("--accumulate", type=int, default=8, help="such batches make a step")
    add("--max-tokens", type=int, default=4096, help="of a row")
    add("--rate", type=float, default=5e-6)
    add("--muon", type=float, default=0.0, metavar="RATE", help="Muon for matrices of layers")
    add("--warm-up", type=int, default=100, help="steps")
    add("--weight-decay", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=500, help="steps")
    add("--log-every", type=int, default=20, help="steps")
    add("--checked", type=int, default=1000, help="lines of each file laid out before training")
    add("--bf16", action="store_true", help="products in bfloat16 on a CPU, too")
    add("--cpu", action="store_true", help="even if there is a GPU")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or say in one sentence why not."""
    commands = parser()
    given = commands.parse_args(arguments)
    try:
        train(given)
    except (DataError, folder.ModelError, LayoutError, OSError) as error:
        commands.error(str(error))


if __name__ == "__main__":
    main()
