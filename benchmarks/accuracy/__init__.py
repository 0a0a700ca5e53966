"""How right the answers of each method are, offline and on servers."""
