"""weights layer."""
