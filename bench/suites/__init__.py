# SPDX-License-Identifier: Apache-2.0
"""One module per suite, each with `run(quick)`; see `bench.harness`."""
