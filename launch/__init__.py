# SPDX-License-Identifier: Apache-2.0
"""Commands that start SGLang with KV retrieval: the demo, the test suite, and recipes for models."""
