"""Where the KV lives: host pages, digests, device slots, and the streams between them."""
