# SPDX-License-Identifier: Apache-2.0
"""A laboratory of reuse in plain torch, without an engine: see `command`."""
