# SPDX-License-Identifier: Apache-2.0
"""The pools that hold KV and digests, on the host and on the device, and the streams that copy between them."""
