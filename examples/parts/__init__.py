"""What the two training scripts share, their data and models; mixed precision is in ``levels`` alone."""
