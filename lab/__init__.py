# SPDX-License-Identifier: Apache-2.0
"""How the bundled model is made: what it is trained on, the model, the loop."""
