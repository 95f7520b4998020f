"""Engines that serve: measured, soaked, and simulated."""
