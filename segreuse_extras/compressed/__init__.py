# SPDX-License-Identifier: Apache-2.0
"""Documents of knowledge bases of which fewer tokens are retained, and requests that name them."""
