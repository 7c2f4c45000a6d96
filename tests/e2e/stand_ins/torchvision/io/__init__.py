# SPDX-License-Identifier: Apache-2.0
"""Names that are imported and not used: images are read by Pillow."""

ImageReadMode = decode_image = None
