"""How wide rounds are, and at what price: widths, trees, rounds, costs."""
