# SPDX-License-Identifier: Apache-2.0
"""How programs run on the loaded model. Each module here runs one type of `plan.Program`, and
defines

- `PROGRAM`: that type;
- `run(program, layers, batch)`: computes the batch's plans, which have this program, in chunks;
- `proof_cases(num_layers)`: what the start-up proof has it compute (`base.ProofCase`).
"""

from __future__ import annotations

from types import ModuleType

from vllm_segreuse.plan import Program
from vllm_segreuse.plan.discovery import modules_of
from vllm_segreuse.prefill.acceptance import Halos
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase


def find_programs() -> dict[type[Program], ModuleType]:
    """The modules of this folder, by what they run."""
    return {module.PROGRAM: module for module in modules_of(__name__).values()}


PROGRAMS = find_programs()


def run(layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """Compute the plans of a batch by their program, and compare halos where it has checks."""
    halos = Halos(layers, batch) if any(plan.check for plan in batch.plans) else None
    computed: Computed = yield from PROGRAMS[type(batch.program)].run(batch.program, layers, batch)
    if halos is not None:
        batch.boundary_drifts = halos.drifts()
    return computed


def proof_cases(num_layers: int) -> list[ProofCase]:
    """Those of every program, for a model of so many layers."""
    return [case for module in PROGRAMS.values() for case in module.proof_cases(num_layers)]
