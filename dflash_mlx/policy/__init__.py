"""How many tokens each step drafts."""
