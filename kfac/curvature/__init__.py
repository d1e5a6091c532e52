"""What curvature is made of: layers, what a loss captures of them, and their blocks."""
