# SPDX-License-Identifier: Apache-2.0
"""Commands around a server with KV retrieval: the doctor, the demo, the test suite, and the page of flags."""
