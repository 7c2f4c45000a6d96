# SPDX-License-Identifier: Apache-2.0
"""Worker side: align reused KV, then compute only the tokens that need it.

Order of a pass (see `executor.py`): `align` copies and rotates the reused KV, `batch` lays the
plans of one program out, and the program's module in `programs/` runs it: `layer_runner` runs the
model's own decoder layers on tokens, which attend as `attention` says, and `selection` picks the
reused tokens to recompute. `checks` builds all of it at start-up, and has `proofs/` prove that it
is right for the loaded model.
"""
