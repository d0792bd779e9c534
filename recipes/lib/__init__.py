"""What only recipes and tests import."""
