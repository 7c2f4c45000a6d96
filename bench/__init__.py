# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `python -m bench SUITE [--quick] [--json FILE]`; not part of what is installed."""
