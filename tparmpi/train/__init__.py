"""Training runs: configuration, run folder, metrics, the loop, and text generation."""
