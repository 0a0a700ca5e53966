"""The papers' figures again, on one machine."""
