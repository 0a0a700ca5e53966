"""Measurements of speed and accuracy. Each module answers one question; run it as ``python -m benchmarks.NAME`` from the checkout."""
