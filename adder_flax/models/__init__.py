"""Whole networks and their named sizes."""
