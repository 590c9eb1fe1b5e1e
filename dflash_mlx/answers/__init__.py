"""Parts of a model's answer: text, reasoning and calls, in the syntax of its family."""
