"""Flower's processes on this machine: starting, watching and ending them."""
