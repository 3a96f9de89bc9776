"""How the bytes of one group travel: one class for each way, behind one interface."""
