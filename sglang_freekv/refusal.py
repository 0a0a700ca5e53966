# SPDX-License-Identifier: Apache-2.0
"""Refusal: what a user hears who asks for something that is not served."""

from __future__ import annotations

from typing import Any

MOST_SHOWN = 200  # characters of a value in a message


class Refusal(ValueError):
    """A request for something FreeKV does not serve.

    The message is one line, names the flag as the user typed it, and says what to use instead.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # a value that the message repeats may have several lines


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """``value`` as a message shows it: its first ``most`` characters, or its type if Python does not print it."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or too many lists in lists
        return f"of type {type(value).__name__}"
    return text if len(text) <= most else text[:most] + " ..."
