"""Other systems: what their KL flags optimize, read from their launch files, and what to set instead."""
