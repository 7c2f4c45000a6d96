# SPDX-License-Identifier: Apache-2.0
"""What is not proven where a model's layers are divided among pipeline stages (`prefill/stages/`),
which carry plans out in several steps."""
