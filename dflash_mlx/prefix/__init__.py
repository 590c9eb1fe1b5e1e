"""What requests share of what they have read: prompts that begin alike are read once."""
