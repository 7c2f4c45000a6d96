# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases: documents that are computed once, and whose KV stays in GPU memory."""
