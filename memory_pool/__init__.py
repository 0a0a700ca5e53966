# SPDX-License-Identifier: Apache-2.0
"""Where the KV lives: host pages, digests, device slots, and the streams between them."""
