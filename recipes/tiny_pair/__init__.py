"""How the embedded pair is made: its synthetic texts, tokenizer, target and drafters."""
