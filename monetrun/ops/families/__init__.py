"""Families of operators, one file each: their definitions, costs and alternative implementations.

``registry.load`` imports every module of this package, so that a new family is a new file and no list changes.
"""
