# SPDX-License-Identifier: Apache-2.0
"""Optional features, a folder each: `scheduler.py` in the scheduler's process, `worker.py` in a
worker. `in_scheduler.py` and `../worker.py` list them."""
