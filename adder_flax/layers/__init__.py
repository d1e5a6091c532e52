"""What a transformer block is made of."""
