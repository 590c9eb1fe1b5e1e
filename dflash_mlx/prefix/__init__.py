"""A cache of what requests have read: prompts with a common prefix are read once."""
