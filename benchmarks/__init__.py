"""Measurements and comparisons that are no part of the installed package."""
