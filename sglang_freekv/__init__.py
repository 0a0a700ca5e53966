"""KV-cache retrieval for ordinary GQA models inside stock SGLang."""

__version__ = "0.1.0"
