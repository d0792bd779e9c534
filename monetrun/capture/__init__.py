"""A model's joint graph, what its operators cost and hold, and the code that runs a schedule."""
