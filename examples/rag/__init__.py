# SPDX-License-Identifier: Apache-2.0
"""Questions over a knowledge base, with BM25 retrieval; see README.md beside this file."""
