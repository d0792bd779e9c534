"""Modules that only the recipes and tests import."""
