"""Alternative implementations of operators: what they compute, what they cost, and where they may be used."""
