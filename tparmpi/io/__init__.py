"""What goes to and comes from disk: checkpoints (HDF5) and text data."""
