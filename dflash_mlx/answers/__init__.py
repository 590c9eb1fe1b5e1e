"""What a model's answer is made of: text, reasoning and calls, as its family writes them."""
