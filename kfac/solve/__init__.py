"""The linear systems (F + γI) x = b of the blocks."""
