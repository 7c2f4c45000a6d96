# SPDX-License-Identifier: Apache-2.0
"""The second tier: KV of evicted blocks in host memory and in files.

This half knows segments: entries of the index (`catalogue`), what requests load (`loads`), rows of
host memory (`host_rows`, `region`), documents (`keeping`), and the workers' copies (`mover`). Files
are the affair of `segreuse_store`, which knows none of these.
"""
