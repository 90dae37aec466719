"""Typed settings, and reading them from presets and files."""
