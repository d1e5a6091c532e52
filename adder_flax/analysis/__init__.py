"""What one learns from a run: operation counts, spectra, maps, walks, energy, figures."""
