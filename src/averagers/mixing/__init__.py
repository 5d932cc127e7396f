"""What the mean does to the weights, and when it lands."""
