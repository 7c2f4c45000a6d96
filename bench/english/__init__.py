# SPDX-License-Identifier: Apache-2.0
"""`python -m bench english`: what reuse costs a pretrained model on English text."""
