# SPDX-License-Identifier: Apache-2.0
"""Worker side: align reused KV, then compute only the tokens that need it.

Order of a pass (see `executor.py`): `align` copies and rotates the reused KV, `rows` lays the
active tokens out for the stock attention backend, `layers` runs the model's own decoder layers on
them, `selection` picks the reused tokens to recompute. `checks`, `kv_layout` and `rope` prove at
start-up that all of this is right for the loaded model.
"""
