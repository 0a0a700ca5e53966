# SPDX-License-Identifier: Apache-2.0
"""Refusal: what a user hears who asks for something that is not served."""

from __future__ import annotations


class Refusal(ValueError):
    """A request for something FreeKV does not serve.

    The message is one line, names the flag as the user typed it, and says what to use instead.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # a value that the message repeats may have several lines
