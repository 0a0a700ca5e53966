"""Small models that find facts in long prose, the prompts for them, and their training."""
