"""Trial switches."""
import os


def on(name: str) -> bool:
    return name in os.environ.get("TRIAL", "").split(",")


def number(name: str, usual: int) -> int:
    """Of a switch such as plan16."""
    values = [x[len(name) :] for x in os.environ.get("TRIAL", "").split(",") if x.startswith(name)]
    return next((int(x) for x in values if x.isdigit()), usual)
