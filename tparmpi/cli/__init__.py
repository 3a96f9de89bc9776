"""The `tparmpi` command: one file for each of its commands."""
