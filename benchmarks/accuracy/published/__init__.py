"""Published benchmarks against a running server, for models with real weights."""
