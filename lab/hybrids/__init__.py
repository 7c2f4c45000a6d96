# SPDX-License-Identifier: Apache-2.0
"""The study of reuse in a model with linear attention: do answers survive composed states?"""
